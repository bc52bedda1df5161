//go:build unix

package main

import (
	"context"
	"errors"
	"math"
	"os"
	"syscall"
	"time"

	"github.com/pgxlock/pgxlock"
)

// The supervisor of a command that runs under a lock ends the command before the lock ends.

// conduct calls fn, which waits for what a command needs and passes it to under, once or again
// and again; under runs the command and returns when all of it has ended. While no command
// runs, a signal that would end one ends fn's context.
func (e *task) conduct(ctx context.Context, signals chan os.Signal, fn func(ctx context.Context, under func(tenure) error) error) error {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // all signals are ours
	defer cancel(nil)
	type request struct {
		tenure
		ended chan error
	}
	requests, ended := make(chan request), make(chan error, 1)
	go func() {
		ended <- fn(ctx, func(t tenure) error {
			r := request{t, make(chan error)}
			requests <- r
			return <-r.ended
		})
	}()
	processes := newReaper()
	for {
		select {
		case <-processes.changes: // an orphan's
		case sig := <-signals:
			if ends(sig) {
				cancel(interrupted{signalNumber(sig)})
			}
		case r := <-requests:
			err := context.Cause(ctx)
			if err == nil {
				err = e.supervise(r.tenure, signals, processes)
			}
			r.ended <- err
		case err := <-ended:
			if why := context.Cause(ctx); why != nil {
				return why
			}
			return err
		}
	}
}

// supervision is a command that runs under a tenure. Times are readings of bootClock.
//
// Without a renewal the command gets SIGTERM a grace before the lock's deadline, and
// SIGKILL half a grace before it: on a busy machine a process that is killed takes a
// while to die. The watcher does the same if we do not, with SIGTERM after a quarter of
// the grace, so that we are the first if we are there.
type supervision struct {
	*task
	tenure
	group     processGroup
	tty       *terminal
	watcher   *watcher
	processes *reaper
	report    context.CancelFunc // ends what is said of renewals

	until  time.Duration  // the deadline that we know of
	told   bool           // the command has been told to end, for the lock's sake
	killAt time.Duration  // when it is killed then
	ending syscall.Signal // asked us to end, too, and was passed on
	over   bool           // the command has ended; what it left may be there
	status syscall.WaitStatus
	pause  time.Duration // until we look again whether what it left is gone
}

// never is a deadline without a lock.
const never = time.Duration(math.MaxInt64)

// supervise runs the command, and returns when all of it has ended.
func (e *task) supervise(t tenure, signals chan os.Signal, processes *reaper) error {
	s := &supervision{task: e, tenure: t, processes: processes, pause: time.Millisecond}
	reporting, stop := context.WithCancel(context.Background())
	defer stop()
	s.report = stop
	if s.lock != nil {
		go e.renewals.run(reporting, e, s.lock)
	}
	err := s.run(signals)
	switch {
	case s.told:
		return outcome{exitLost, endedCommand{s.ending}}
	case err != nil:
		return err
	}
	if end := s.end(); end.code != exitOK {
		return outcome{end.code, end}
	}
	return nil
}

// end is how the command has ended.
func (s *supervision) end() commandEnd {
	if s.status.Signaled() {
		by := s.status.Signal()
		return commandEnd{exitSignal + int(by), by, s.ending}
	}
	return commandEnd{code: s.status.ExitStatus(), passed: s.ending}
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
	if s.watcher, err = startWatcher(s.group, s.schedule(), s.health); err != nil {
		_ = gate.Close()
		_, _ = syscall.Wait4(s.group.pid, nil, 0, nil) // it ends when it is not let go
		return err
	}
	s.processes.started()
	defer s.watcher.dismiss(s.processes.changes)
	s.tty = takeTerminal(s.group, signals)
	defer s.tty.close()
	if _, err := gate.Write([]byte{1}); err != nil {
		s.say("%s", printable(err.Error())) // it has ended, and changes will say how
	}
	var lost, asked <-chan struct{}
	if s.lock != nil {
		lost = s.lock.Lost()
	}
	if s.work != nil {
		asked = s.work.Done()
	}
	timer := time.NewTimer(0)
	for !s.done() {
		timer.Reset(s.look())
		select {
		case <-timer.C:
		case sig := <-signals:
			s.pass(sig.(syscall.Signal))
		case <-lost:
			lost = nil
			s.stop(nil)
		case <-asked:
			asked = nil
			s.stop(context.Cause(s.work))
		case c := <-s.processes.changes:
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
		if s.overslept() {
			s.stop(nil)
		}
		s.over, s.status = true, c.status
		s.health.remove()
		s.tty.takeBack()
	}
}

// done reports whether the command and what it left in its group are gone. A lock that
// is lost is not worth waiting for that.
func (s *supervision) done() bool {
	return s.over && (errors.Is(s.group.signal(syscall.SIGKILL), syscall.ESRCH) || s.lock != nil && s.lock.Err() != nil)
}

// look does what is due, and returns when to look again.
func (s *supervision) look() time.Duration {
	const later = time.Hour
	switch {
	case s.over:
		s.pause = min(2*s.pause, time.Second)
		return s.pause
	case s.lock == nil:
		return later
	case !s.told:
		known := s.schedule()
		s.until = s.deadline()
		left := s.until - s.grace - bootClock()
		if left > 0 {
			s.watcher.tell(s.schedule())
		}
		if left > 0 && bootClock() < known.Term { // the watcher knew of the renewal in time, also if we were frozen just now
			return min(left, s.ttl/12) // soon enough for the watcher to know of most renewals
		}
		s.stop(nil)
	}
	if left := s.killAt - bootClock(); left > 0 {
		return left
	}
	_ = s.group.signal(syscall.SIGKILL) // if that fails, so will everything else
	return later
}

// deadline is until when the lock may be believed in.
func (s *supervision) deadline() time.Duration {
	if s.lock == nil {
		return never
	}
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

// overslept reports whether we were frozen for so long that the watcher has told the command to
// end: also if the lock is renewed since.
func (s *supervision) overslept() bool { return !s.told && bootClock() >= s.schedule().Term }

// stop tells the command to end, because the lock is lost or is about to be, or because its
// holder was asked to step down, and has the whole grace for that.
func (s *supervision) stop(why error) {
	lost := s.lock.Err()
	asked := lost == nil && errors.Is(why, pgxlock.ErrStepDown)
	left := s.grace / 2
	if asked {
		left = s.grace
	}
	killAt := min(bootClock()+left, s.until-s.grace/2)
	switch {
	case s.over, s.told && killAt >= s.killAt:
		return
	case s.told: // now the lock is lost as well
		s.killAt = killAt
		s.watcher.tell(s.schedule())
		return
	}
	s.told, s.killAt = true, killAt
	s.report() // what is said now is the last word
	s.health.remove()
	s.group.end()
	s.watcher.tell(s.schedule())
	switch {
	case asked:
		s.say("%s; ending the command", describe(s.target.flags, why))
	case lost != nil:
		s.say("%s; ending the command", describe(s.target.flags, lost))
	default:
		s.say("the lock on %s could not be renewed; ending the command", shown(s.key))
	}
}

// pass passes a signal on. Those that end a command go to all of its group, as they
// would from a terminal; the others have a meaning of their own to the command itself.
func (s *supervision) pass(sig syscall.Signal) {
	if ends(sig) && sig != syscall.SIGHUP { // by which many programs read their files again
		s.ending = sig
	}
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
