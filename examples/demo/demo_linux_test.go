package main

import (
	"io"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// That a frozen worker ends as well must not depend on the process that becomes its parent, so it gets
// one of its own session.
func TestWorkersEndWithADemonstrationThatIsKilled(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	if code, stderr := endDemo(t, func(p *os.Process, _ io.Closer) error { return p.Kill() }); code != -1 {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// Linux sends the parent-death signal of a child when the thread that started it ends.
func TestWorkersOutliveTheThreadThatStartedTheirTeam(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	var crew *team
	var err error
	thread := onThreadThatEnds(func() { crew, err = startTeam(db.URL, "worker-1") })
	if err != nil {
		t.Fatal(err)
	}
	defer crew.stop()
	for unix.Tgkill(unix.Getpid(), thread, 0) == nil { // until the thread has ended
		runtime.Gosched()
	}
	for _, do := range []string{doTry, doLook} {
		if _, err := crew.must(t.Context(), crew.workers[0], order{Do: do, Key: "job", TTL: time.Minute}); err != nil {
			t.Fatal(err)
		}
	}
}

// onThreadThatEnds calls f on a thread that ends then, whose number it returns.
func onThreadThatEnds(f func()) (thread int) {
	called := make(chan struct{})
	go func() {
		defer close(called)
		runtime.LockOSThread() // without an unlock the thread ends with this goroutine
		if thread = unix.Gettid(); thread == unix.Getpid() {
			thread = onThreadThatEnds(f) // the first thread of a process does not end, but this goroutine keeps it busy
		} else {
			f()
		}
	}()
	<-called
	return thread
}
