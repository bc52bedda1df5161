package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// On Linux a second process, the watcher, ends the command if pgxlock run is killed, or is
// frozen beyond the end of the lock.

// newRunInner returns the commands that run starts this program with.
func newRunInner() []*cobra.Command { return []*cobra.Command{newRunGate(), newRunWatcher()} }

// ourselves is the file of this program, also after it was replaced by another version.
func ourselves() string { return "/proc/self/exe" }

// bootClock goes on while the machine sleeps, and is the same for all processes.
func bootClock() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic("pgxlock: CLOCK_BOOTTIME: " + err.Error()) // Linux has it since 2.6.39
	}
	return time.Duration(t.Nano())
}

// adoptOrphans makes processes ours whose parents have ended, so that those of the
// command's group are reaped where the system's first process does not do that.
func adoptOrphans() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// A schedule is what the watcher does, and when by bootClock, if it hears nothing more.
// All zero: nothing, the command has ended.
type schedule struct {
	Term  time.Duration // 0: the command knows already
	Kill  time.Duration
	Alone time.Duration // instead of Kill, if we are gone
}

const scheduleSize = 3 * 8

// A watcher is that process, seen from here.
type watcher struct {
	process int
	pipe    int // our end
}

// The files that a watcher inherits.
const (
	watcherPipe   = 3
	watcherLeader = 4 // a pidfd of the command
)

const watcherCommand = "run-watcher"

// startWatcher starts the watcher of a group, whose leader must not have been reaped. The
// watcher removes the health file when it tells the group to end.
func startWatcher(g processGroup, first schedule, health *healthFile) (*watcher, error) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	defer func() { _ = unix.Close(pipe[0]) }()
	w := &watcher{pipe: pipe[1]}
	w.tell(first)
	null, err := unix.Open(os.DevNull, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
	}
	defer func() { _ = unix.Close(null) }()
	files := []uintptr{uintptr(null), uintptr(null), uintptr(null), uintptr(pipe[0])}
	if leader, err := unix.PidfdOpen(g.pid, 0); err == nil { // since Linux 5.3
		defer func() { _ = unix.Close(leader) }()
		files = append(files, uintptr(leader))
	}
	// In a session of its own, so that what ends us or the command does not end it.
	args := []string{"pgxlock", watcherCommand, strconv.Itoa(g.pid), strconv.Itoa(len(files))}
	if health != nil {
		args = append(args, health.path, health.content)
	}
	w.process, err = syscall.ForkExec(ourselves(), args, &syscall.ProcAttr{
		Dir: "/", Env: os.Environ(), Files: files, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		_ = unix.Close(w.pipe)
		return nil, fmt.Errorf("start the watcher: %w", err)
	}
	return w, nil
}

func (w *watcher) pid() int { return w.process }

// tell gives the watcher another schedule. One that takes no more has ended, or is
// frozen.
func (w *watcher) tell(s schedule) {
	var b []byte
	for _, at := range []time.Duration{s.Term, s.Kill, s.Alone} {
		b = binary.NativeEndian.AppendUint64(b, uint64(at))
	}
	_, _ = unix.Write(w.pipe, b)
}

// dismiss tells the watcher that the command has ended, and waits a moment for it.
func (w *watcher) dismiss(changes <-chan change) {
	w.tell(schedule{})
	_ = unix.Close(w.pipe)
	for patience := time.After(time.Second); ; {
		select {
		case c := <-changes:
			if c.pid == w.process {
				return
			}
		case <-patience:
			return
		}
	}
}

// newRunWatcher is the watcher.
func newRunWatcher() *cobra.Command {
	return &cobra.Command{
		Use:    watcherCommand + " GROUP FILES [PATH CONTENT]",
		Short:  "End a process group when told to, or when nobody is there who could",
		Hidden: true,
		Args:   cobra.RangeArgs(2, 4),
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[0])
			if err != nil {
				return err
			}
			leader := -1
			if args[1] == strconv.Itoa(watcherLeader+1) {
				leader = watcherLeader
			}
			var health *healthFile
			if len(args) == 4 {
				health = &healthFile{path: args[2], content: args[3]}
			}
			return (&watched{processGroup{pid}, leader, health}).watch()
		},
	}
}

// watched is the command, seen from the watcher.
type watched struct {
	processGroup
	leader int         // its pidfd; -1: there is none
	health *healthFile // nil: none
}

// watch keeps to the schedule that it was told last, and ends when the group has. It
// only ever waits: for another schedule, for the time that it names, and when it is
// alone for the end of the command.
func (w *watched) watch() error {
	timer, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("timerfd_create", err)
	}
	var o schedule
	told := false
	fds := []unix.PollFd{{Fd: watcherPipe, Events: unix.POLLIN}, {Fd: int32(timer), Events: unix.POLLIN}, {Fd: -1, Events: unix.POLLIN}}
	heard, due, ended := &fds[0], &fds[1], &fds[2]
	for {
		if _, err := unix.Poll(fds, -1); errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			return os.NewSyscallError("poll", err)
		}
		switch {
		case ended.Revents != 0 || due.Revents != 0 && told:
			w.signal(syscall.SIGKILL)
			return nil // all of the group dies of it, also what is just being forked
		case heard.Revents != 0:
			now, err := readSchedule(heard.Fd)
			switch {
			case errors.Is(err, unix.EAGAIN):
				continue
			case err != nil: // nobody is there who could tell more
				o.Kill = o.Alone
				heard.Fd, ended.Fd = -1, int32(w.leader)
			case now == schedule{}:
				return nil
			default:
				o = now
			}
			if heard.Fd == -1 && !told {
				w.end()
			}
			told = told || heard.Fd == -1 || o.Term == 0
		case due.Revents != 0:
			w.end()
			told = true
		}
		at := o.Term
		if told {
			at = o.Kill
		}
		// One that has passed is due at once; zero would be never.
		alarm := &unix.ItimerSpec{Value: unix.NsecToTimespec(max(int64(at), 1))}
		if err := unix.TimerfdSettime(timer, unix.TFD_TIMER_ABSTIME, alarm, nil); err != nil {
			return os.NewSyscallError("timerfd_settime", err)
		}
	}
}

// readSchedule reads one message, which arrives whole.
func readSchedule(fd int32) (schedule, error) {
	var b [scheduleSize]byte
	n, err := unix.Read(int(fd), b[:])
	switch {
	case err != nil:
		return schedule{}, err
	case n != scheduleSize:
		return schedule{}, os.ErrClosed
	}
	at := func(i int) time.Duration { return time.Duration(binary.NativeEndian.Uint64(b[8*i:])) }
	return schedule{at(0), at(1), at(2)}, nil
}

// end tells all of the group to end; what is stopped must go on for that.
func (w *watched) end() {
	w.health.remove()
	w.signal(syscall.SIGTERM)
	w.signal(syscall.SIGCONT)
}

// pidfdSignalProcessGroup is PIDFD_SIGNAL_PROCESS_GROUP of linux/pidfd.h.
const pidfdSignalProcessGroup = 1 << 2

// signal sends a signal to all of the group. Since Linux 6.9 that can be no other one
// that has the number by now.
func (w *watched) signal(sig syscall.Signal) {
	if w.leader >= 0 {
		if err := unix.PidfdSendSignal(w.leader, sig, nil, pidfdSignalProcessGroup); err == nil || errors.Is(err, unix.ESRCH) {
			return
		}
	}
	_ = w.processGroup.signal(sig) // if that fails, there is nobody left to tell
}
