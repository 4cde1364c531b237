/* SPDX-License-Identifier: Apache-2.0 */
/* Release and commit of this build. */
#ifndef MOE_BASE_BUILD_H
#define MOE_BASE_BUILD_H

/* "0.1.0": both sides of a connection compare it. Static. */
const char *moe_build_version(void);

/* Twelve hexadecimal digits, or "unknown" for a build outside of a checkout. Static. */
const char *moe_build_commit(void);

#endif
