//go:build !windows

package pgserver

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
)

// sleepLong are arguments for a program that does nothing until it is stopped.
func sleepLong(string) []string { return []string{"10000"} }

func readyAtOnce(context.Context, string) error { return nil }

// companionDirs returns the directories of programs that run beside a server.
func companionDirs(t *testing.T, s *Server) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(s.dir.path, "p[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

func TestCompanionThatIsStoppedLeavesNothing(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	c, err := s.Companion(t.Context(), "sleep", sleepLong, readyAtOnce)
	if err != nil {
		t.Fatal(err)
	}
	if dirs := companionDirs(t, s); len(dirs) != 1 || dirs[0] != c.dir {
		t.Fatalf("there are %v, not %s alone", dirs, c.dir)
	}
	if err := c.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c.process.running() {
		t.Error("it still runs")
	}
	if dirs := companionDirs(t, s); len(dirs) > 0 {
		t.Errorf("%v are left", dirs)
	}
}

func TestCompanionThatNeverGetsReadyLeavesNothing(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	notReady := errors.New("not ready")
	for name, test := range map[string]struct {
		program string
		ready   func(context.CancelFunc) error
	}{
		"it ends by itself":    {"false", func(context.CancelFunc) error { return notReady }},
		"nobody waits longer":  {"sleep", func(cancel context.CancelFunc) error { cancel(); return notReady }},
		"it cannot be started": {"there-is-no-such-program", func(context.CancelFunc) error { return nil }},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		c, err := s.Companion(ctx, test.program, sleepLong, func(context.Context, string) error { return test.ready(cancel) })
		cancel()
		if c != nil || err == nil {
			t.Fatalf("%s: there is one, error %v", name, err)
		}
		if dirs := companionDirs(t, s); len(dirs) > 0 {
			t.Errorf("%s: %v are left", name, dirs)
		}
		if pids := children(s.PID()); len(pids) == 0 {
			t.Errorf("%s: the server is gone too", name)
		}
	}
}
