package main

import (
	"syscall"
	"testing"
)

// On Linux alone the server ends with a parent that is killed, so only there may
// this test kill one.
func TestWorkersEndWithADemonstrationThatIsKilled(t *testing.T) {
	t.Parallel()
	interruptDemo(t, "TMPDIR=", syscall.SIGKILL, -1)
}
