/* SPDX-License-Identifier: Apache-2.0 */
/* A terminal that shows one text after the other, in place. ANSI sequences only. */
#ifndef MOECTL_SCREEN_H
#define MOECTL_SCREEN_H

#include <stdbool.h>
#include <stdint.h>

/* Takes the terminal over: the alternate screen, no echo. False when stdin or stdout is none; then
 * nothing has changed. A signal that ends the process gives the terminal back. */
bool moectl_screen_open(void);
void moectl_screen_close(void);
/* Shows `text`, cut to the terminal's size. Its control characters other than line breaks must be
 * escaped. The first line stands out. */
void moectl_screen_show(const char *text);
enum moectl_screen_key {
    MOECTL_SCREEN_TIME,    /* `until_ns` */
    MOECTL_SCREEN_RESIZED, /* show the text again */
    MOECTL_SCREEN_QUIT,    /* the user typed q or Ctrl-C */
};
enum moectl_screen_key moectl_screen_wait(uint64_t until_ns);

#endif
