package main

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A renewalReport says why the lock of a run is not renewed, once for each cause, and when it is
// renewed again. It runs in a goroutine of its own, because the reader of its messages may be
// slow, and the command must be ended in time.
type renewalReport struct {
	events chan pgxlock.Event // has room for one, the newest
	failed map[string]bool    // the causes that were said since the last good renewal
}

func newRenewalReport() *renewalReport {
	return &renewalReport{make(chan pgxlock.Event, 1), make(map[string]bool)}
}

// observe is for LeaseConfig.Observe. Events of one lock come one after the other, and there is
// one lock at a time.
func (r *renewalReport) observe(_ context.Context, e pgxlock.Event) {
	if e.Op != pgxlock.EventRenewed {
		return
	}
	select {
	case <-r.events: // the report is behind
	default:
	}
	r.events <- e
}

// run reports of the lock until ctx ends.
func (r *renewalReport) run(ctx context.Context, e *task, lock *pgxlock.Lock) {
	r = &renewalReport{r.events, make(map[string]bool)} // that of an earlier lock may still be saying something
	for {
		select {
		case <-ctx.Done():
			return
		case renewed := <-r.events:
			if renewed.Holder != lock.Holder() { // it is of an earlier term
				continue
			}
			until, _ := lock.Deadline()
			if text := r.text(e, renewed.Err, time.Until(until)); text != "" {
				e.say("%s", text)
			}
		}
	}
}

// text is what there is to say of a renewal that failed, or did not, if anything is. left is how
// long the lock is held without another one.
func (r *renewalReport) text(e *task, failed error, left time.Duration) string {
	switch {
	case failed == nil && len(r.failed) > 0:
		clear(r.failed)
		return "the lock on " + shown(e.key) + " is renewed again"
	case failed == nil || r.failed[causeOf(failed)]:
		return ""
	case errors.Is(failed, lockerr.ErrRowLocked) && left > e.ttl/2: // holders that share a lock delay each other for a moment
		return ""
	}
	r.failed[causeOf(failed)] = true
	return fmt.Sprintf("%s; trying again: the lock is held for another %s, and the command is ended %s before that",
		explain(e.target.flags, failed), readable.Duration(max(0, left)), readable.Duration(e.grace))
}

// causeOf returns what errors of one cause have in common: not the ports and processes that
// their texts name.
func causeOf(err error) string {
	if failed, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return unconnected(failed)
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code
	}
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	return err.Error()
}
