package main

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// On Linux alone the server ends with a parent that is killed, so only there may
// this test kill one. That a frozen worker ends as well must not hang on who
// becomes its parent, so it gets one of its own session.
func TestWorkersEndWithADemonstrationThatIsKilled(t *testing.T) {
	t.Parallel()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	interruptDemo(t, "TMPDIR=", syscall.SIGKILL, -1)
}
