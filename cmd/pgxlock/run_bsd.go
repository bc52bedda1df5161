//go:build unix && !linux

package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"
)

// On these systems nobody watches over run itself: if it is killed or frozen, the
// command goes on beyond the end of the lock.

func newRunInner() []*cobra.Command { return []*cobra.Command{newRunGate()} }

func ourselves() string {
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

var began = time.Now()

func bootClock() time.Duration { return time.Since(began) }

func adoptOrphans() {}

type schedule struct{ Term, Kill, Alone time.Duration }

type watcher struct{}

func startWatcher(processGroup, schedule, *healthFile) (*watcher, error) { return nil, nil }
func (*watcher) pid() int                                                { return -1 }
func (*watcher) tell(schedule)                                           {}
func (*watcher) dismiss(<-chan change)                                   {}
