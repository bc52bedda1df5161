package pgxlock

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The ticket of a wait that ended is in the table until it is removed from there.
func TestSharedTryIsNotRefusedByAVoidTicketOfItsOwnLocker(t *testing.T) {
	t.Parallel()
	for kind, newLocker := range map[string]func(*pgtest.DB) (*Locker, error){
		"lease":    func(db *pgtest.DB) (*Locker, error) { return NewLeaseLocker(db.Pool, nil) },
		"advisory": func(db *pgtest.DB) (*Locker, error) { return NewAdvisoryLocker(db.Pool, nil) },
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
				t.Fatal(err)
			}
			locks, err := newLocker(db)
			if err != nil {
				t.Fatal(err)
			}
			defer locks.Close(context.Background())
			q, name := locks.queue, locks.backend.name("k")
			resume, withdraw := make(chan struct{}), q.withdrawing.Run
			q.withdrawing.Run = func(batch []*ticket) error {
				<-resume
				return withdraw(batch)
			}
			reading, err := locks.Acquire(t.Context(), "k", Shared)
			if err != nil {
				t.Fatal(err)
			}
			ctx, leave := context.WithCancel(t.Context())
			writer := acquiring(ctx, locks, "k")
			eventually(t, "the writer has a ticket", func() bool {
				q.lines.mu.Lock()
				defer q.lines.mu.Unlock()
				l := q.lines.of[name]
				if l != nil && l.ticket == nil {
					q.enter(l) // of an advisory lock that is held here it needs none by itself
				}
				return l != nil && l.ticket != nil && l.ticket.number != 0 && !l.ticket.pending()
			})

			leave()
			if got := <-writer; !errors.Is(got.err, context.Canceled) {
				t.Error(got.err)
			}
			try := acquiring(t.Context(), locks, "k", Shared, NoWait)
			var got *attempt
			eventually(t, "the try has its answer, or waits for the ticket to be removed", func() bool {
				select {
				case a := <-try:
					got = &a
					return true
				default:
					q.lines.mu.Lock()
					defer q.lines.mu.Unlock()
					return len(q.void[name]) == 1 && q.void[name][0].gone != nil
				}
			})
			close(resume)
			if got == nil {
				a := <-try
				got = &a
			}
			if got.err != nil {
				t.Fatalf("nobody waits, and nobody has it alone: %v", got.err)
			}
			if err := errors.Join(got.lock.Release(t.Context()), reading.Release(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("not yet: %s", what)
		}
	}
}
