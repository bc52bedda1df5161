package lease

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestLeaseThatComesWhenNoneWasHeldIsRenewed(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := newTable(t, db.Pool, Config{TTL: 2 * pgtest.Patience})
	table.cfg.Renew = 200 * time.Millisecond
	for range 2 {
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		first, _ := lock.Ended()
		pgtest.Until(t, "the lease is renewed", func() bool {
			until, err := lock.Ended()
			if err != nil {
				t.Fatal(err)
			}
			return until != first
		})
		_ = lock.End(nil) // as a release does first
		if err := table.Release(lock); err != nil {
			t.Fatal(err)
		}
	}
}

// Whether the server has made the change is not known: the lease is held for the shorter TTL until a
// renewal has said that it lasts for the one that it has.
func TestChangeWhoseAnswerIsLostIsFollowedByARenewal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachWay(t, func(t *testing.T, db batchDB, w *wires, table *Table) {
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		const changes = "pgxlock_change_lease"
		for _, ttl := range []time.Duration{10 * time.Minute, 2 * table.cfg.TTL} {
			for _, refused := range []bool{false, true} { // the second attempt
				reconnect := func() error {
					if !refused {
						return nil
					}
					return db.rename(context.Background(), changes, "hidden")
				}
				for answers, all := -1, false; !all; answers++ {
					if err := table.Change(t.Context(), lock, table.cfg.TTL, nil); err != nil { // now there is a connection
						t.Fatal(err)
					}
					var version string
					if err := db.Pool.QueryRow(t.Context(), "select xmin::text from distributed_locks").Scan(&version); err != nil {
						t.Fatal(err)
					}
					w.lose(version, answers, reconnect) // the statement that changes, not the one that asks for the version
					err := table.Change(t.Context(), lock, ttl, nil)
					w.mu.Lock()
					cut := w.cut
					all, w.cut = w.all, false
					w.mu.Unlock()
					if !cut { // a renewal made another version in between
						answers--
					} else if refused && !all {
						if err == nil {
							t.Error("the change was made, as far as its caller knows")
						}
						if err := db.rename(t.Context(), "hidden", changes); err != nil {
							t.Fatal(err)
						}
					}
					pgtest.Until(t, "the deadline is that of the TTL", func() bool {
						until, err := lock.Ended()
						if err != nil {
							t.Fatal(err)
						}
						return until-table.host.Clock() > lock.Lasts()/2
					})
					db.Exec(t, "do $$ begin assert (select expires_at > clock_timestamp() + '"+(lock.Lasts()/2).String()+"' from distributed_locks); end $$")
				}
				w.lose("no such version", 0, nil)
			}
		}
		_ = lock.End(nil)
		if err := table.Release(lock); err != nil {
			t.Fatal(err)
		}
	})
}

func TestChangeWhoseCallerLeavesBeforeItIsSentIsNotMade(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	lock, err := try(t, table, "k")
	if err != nil {
		t.Fatal(err)
	}
	if err := table.Renew(t.Context(), lock); err != nil { // now there is a connection
		t.Fatal(err)
	}
	resume := pgtest.Occupy(t, table.renewals)
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- table.Change(t.Context(), lock, 20*time.Minute, nil) }()
	pgtest.Until(t, "the first is being sent", func() bool {
		select {
		case <-table.renewer.sending.Done():
			return false
		default:
			return table.renewer.sending.Queued() == 0
		}
	})
	ctx, leave := context.WithCancel(t.Context())
	go func() { second <- table.Change(ctx, lock, 10*time.Minute, nil) }()
	pgtest.Until(t, "the second is queued", func() bool { return table.renewer.sending.Queued() == 1 })
	leave()
	if err := <-second; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	resume()
	if err := <-first; err != nil {
		t.Error(err)
	}
	<-table.renewer.sending.Done()
	if lock.Lasts() != 20*time.Minute {
		t.Errorf("it lasts for %s", lock.Lasts())
	}
}

func TestFailedRenewalIsRetriedBeforeTheDeadlineOfAShorterTTL(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		group := &hold.Group{Clock: func() time.Duration { return time.Since(began) }}
		lock := &hold.Hold{TTL: time.Second / 2}
		group.Begin(lock, owner{}, "k", lockkey.Name{Key: "k"})
		if !lock.Granted(1, 0, 0) {
			t.Fatal("it is late")
		}
		lock.TTL = time.Hour // whose renewal is retried after a second
		r := newRenewer(nil)
		sent := make(chan time.Duration, 1)
		r.sending.Run = func([]renewal) error {
			sent <- group.Clock()
			return nil
		}
		r.again(lock)
		if at, until := <-sent, time.Second/2; at >= until {
			t.Errorf("it is retried after %s, and lasts for %s", at, until)
		}
	})
}

func TestExchangeBesideALeaseLeavesTimeForAnotherOne(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := newTable(t, db.Pool, Config{TTL: 8 * time.Second})
	table.host.Clock = func() time.Duration { return 0 } // the lease is held, no matter how long the test takes
	for range 2 {
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		if got, want := table.renewer.patience(), table.cfg.TTL/2; got != want {
			t.Errorf("an exchange beside the lease may take %s, want %s", got, want)
		}
		if err := table.Renew(t.Context(), lock); err != nil { // now there is a connection
			t.Fatal(err)
		}
		resume := pgtest.Occupy(t, table.renewals)
		changed := make(chan error, 1)
		go func() { changed <- table.Change(t.Context(), lock, time.Second, nil) }()
		pgtest.Until(t, "the exchange leaves time for another one of a shorter TTL", func() bool { return table.renewer.patience() == time.Second/2 })
		resume()
		if err := <-changed; err != nil {
			t.Log(err) // it was too late
		}
		_ = lock.End(nil)                                                               // as a release does first
		if err := table.Release(lock); err != nil && !errors.Is(err, lockerr.ErrLost) { // the server's clock goes on
			t.Fatal(err)
		}
		pgtest.Until(t, "an exchange has its time beside no lease", func() bool { return table.renewer.patience() == dbconn.Timeout }) // the change is over after its answer
	}
}
