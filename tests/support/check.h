/* SPDX-License-Identifier: Apache-2.0 */
/* Assertions on a struct moe_status, and cmocka with the headers it needs. */
#ifndef MOE_TEST_SUPPORT_CHECK_H
#define MOE_TEST_SUPPORT_CHECK_H

#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define assert_ok(expr)                                                                            \
    do {                                                                                           \
        struct moe_status ok_status = (expr);                                                      \
        if (moe_failed(&ok_status))                                                                \
            fail_msg("%s: %s %s", #expr, moe_code_name(ok_status.code), ok_status.text);           \
    } while (0)

/* The call fails with this code and reason. Prints its text. */
#define assert_refused(expr, want_code, want_reason)                                               \
    do {                                                                                           \
        struct moe_status refused_status = (expr);                                                 \
        print_message("  %s/%s: %s\n", moe_code_name(refused_status.code),                         \
                      moe_reason_name(refused_status.reason), refused_status.text);                \
        assert_string_equal(moe_code_name(refused_status.code), moe_code_name(want_code));         \
        assert_string_equal(moe_reason_name(refused_status.reason), moe_reason_name(want_reason)); \
    } while (0)

#endif
