//go:build unix

package main

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/pgxlock/pgxlock"
)

// The supervisor of a command that runs under a lock ends the command before the lock ends.

// supervision is a command that runs under a lock. Times are readings of bootClock.
//
// Without a renewal the command gets SIGTERM a grace before the lock's deadline, and
// SIGKILL half a grace before it: on a busy machine a process that is killed takes a
// while to die. The watcher does the same if we do not, with SIGTERM after a quarter of
// the grace, so that we are the first if we are there.
type supervision struct {
	*errand
	lock    *pgxlock.Lock
	group   processGroup
	tty     *terminal
	watcher *watcher
	report  context.CancelFunc // ends what is said of renewals

	until  time.Duration // the deadline that we know of
	told   bool          // the command has been told to end, for the lock's sake
	killAt time.Duration // when it is killed then
	over   bool          // the command has ended; what it left may be there
	status syscall.WaitStatus
	pause  time.Duration // until we look again whether what it left is gone
}

// supervise runs the command, and gives the lock back when all of it has ended.
func (e *errand) supervise(lock *pgxlock.Lock, signals chan os.Signal) error {
	s := &supervision{errand: e, lock: lock, pause: time.Millisecond}
	reporting, stop := context.WithCancel(context.Background())
	defer stop()
	s.report = stop
	go e.renewals.run(reporting, e, lock)
	err := s.run(signals)
	released := lock.Release(context.Background())
	switch {
	case s.told: // and said
		return outcome{exitLost, errSilent}
	case errors.Is(released, pgxlock.ErrLost):
		return outcome{exitLost, released}
	case err != nil:
		return err
	case released != nil:
		e.say("%s; the lock ends with its TTL", describe(e.target.flags, released))
	}
	if code := exitStatus(s.status); code != exitOK {
		return outcome{code, errSilent}
	}
	return nil
}

// exitStatus is the code that a shell would make of it.
func exitStatus(status syscall.WaitStatus) int {
	if status.Signaled() {
		return exitSignal + int(status.Signal())
	}
	return status.ExitStatus()
}

// run starts the command and returns when all of it has ended. Nothing runs before
// the watcher knows of it, and the terminal is its own.
func (s *supervision) run(signals chan os.Signal) error {
	adoptOrphans()
	gate, err := s.start()
	if err != nil {
		return err
	}
	defer func() { _ = gate.Close() }()
	s.until = s.deadline()
	if s.watcher, err = startWatcher(s.group, s.schedule()); err != nil {
		_ = gate.Close()
		_, _ = syscall.Wait4(s.group.pid, nil, 0, nil) // it ends when it is not let go
		return err
	}
	changes := reap()
	defer s.watcher.dismiss(changes)
	s.tty = takeTerminal(s.group, signals)
	defer s.tty.takeBack()
	if _, err := gate.Write([]byte{1}); err != nil {
		s.say("%s", printable(err.Error())) // it has ended, and changes will say how
	}
	lost := s.lock.Lost()
	timer := time.NewTimer(0)
	for !s.done() {
		timer.Reset(s.look())
		select {
		case <-timer.C:
		case sig := <-signals:
			s.pass(sig.(syscall.Signal))
		case <-lost:
			lost = nil
			s.stop()
		case c := <-changes:
			s.changed(c)
		}
	}
	return nil
}

// changed takes note of what became of one of our processes.
func (s *supervision) changed(c change) {
	switch {
	case c.pid == s.watcher.pid() && bootClock() >= s.schedule().Kill: // it has killed the command, as it should
	case c.pid == s.watcher.pid():
		s.say("the process that watches over this one has ended; if this one is killed or frozen now, the command goes on")
	case c.pid != s.group.pid: // an orphan
	case c.status.Stopped():
		s.stopped(c.status.StopSignal())
	default:
		s.over, s.status = true, c.status
		s.tty.takeBack()
	}
}

// done reports whether the command and what it left in its group are gone. A lock that
// is lost is not worth waiting for that.
func (s *supervision) done() bool {
	return s.over && (errors.Is(s.group.signal(syscall.SIGKILL), syscall.ESRCH) || s.lock.Err() != nil)
}

// look does what is due, and returns when to look again.
func (s *supervision) look() time.Duration {
	const later = time.Hour
	switch {
	case s.over:
		s.pause = min(2*s.pause, time.Second)
		return s.pause
	case !s.told:
		s.until = s.deadline()
		left := s.until - s.grace - bootClock()
		if left > 0 {
			s.watcher.tell(s.schedule())
			return min(left, s.ttl/12) // soon enough for the watcher to know of most renewals
		}
		s.stop()
	}
	if left := s.killAt - bootClock(); left > 0 {
		return left
	}
	_ = s.group.signal(syscall.SIGKILL) // if that fails, so will everything else
	return later
}

// deadline is until when the lock may be believed in.
func (s *supervision) deadline() time.Duration {
	now := bootClock() // first, so that a pause in between makes it earlier
	until, _ := s.lock.Deadline()
	return now + time.Until(until)
}

// schedule returns what the watcher must do if this process does nothing more.
func (s *supervision) schedule() schedule {
	o := schedule{Term: s.until - s.grace/4*3, Kill: s.until - s.grace/2}
	if s.told {
		o = schedule{Kill: s.killAt}
	}
	if s.kind == kindLease { // an advisory lock is free as soon as we are gone
		o.Alone = o.Kill
	}
	return o
}

// stop tells the command to end, because the lock is lost or is about to be.
func (s *supervision) stop() {
	if s.told || s.over {
		return
	}
	s.told = true
	s.report() // what is said now is the last word
	s.killAt = min(bootClock()+s.grace/2, s.until-s.grace/2)
	s.group.end()
	s.watcher.tell(s.schedule())
	if err := s.lock.Err(); err != nil {
		s.say("%s; ending the command", describe(s.target.flags, err))
	} else {
		s.say("the lock on %s could not be renewed; ending the command", shown(s.key))
	}
}

// pass passes a signal on. Those that end a command go to all of its group, as they
// would from a terminal; the others have a meaning of their own to the command itself.
func (s *supervision) pass(sig syscall.Signal) {
	switch {
	case s.over:
	case sig == syscall.SIGCONT:
		s.tty.give()
		_ = s.group.signal(sig)
	case sig == syscall.SIGUSR1 || sig == syscall.SIGUSR2:
		_ = syscall.Kill(s.group.pid, sig)
	default:
		_ = s.group.signal(sig)
	}
}

// stopped lets a command that the terminal has stopped go on, if that is what it
// stopped for, or else stops us, so that the shell sees the whole job stopped.
func (s *supervision) stopped(by syscall.Signal) {
	wantsTerminal := by == syscall.SIGTTIN || by == syscall.SIGTTOU
	switch {
	case s.tty == nil || by == syscall.SIGSTOP && !s.tty.given():
		// Somebody did it who will let it go on.
	case wantsTerminal && (s.tty.give() || s.tty.given()):
		_ = s.group.signal(syscall.SIGCONT)
	case s.told || orphaned():
		if !wantsTerminal { // else it would only stop again
			_ = s.group.signal(syscall.SIGCONT)
		}
	default:
		s.until = s.deadline()
		s.watcher.tell(s.schedule())
		s.tty.takeBack()
		_ = syscall.Kill(0, syscall.SIGSTOP) // SIGCONT lets both go on
	}
}
