package waitqueue

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// heldSession is a LockSession that has some locks, and records what it receives.
type heldSession struct {
	known     lockkey.Known[lockkey.ID]
	wanted    []lockkey.Name // until last
	last      chan struct{}  // receives when lastWanted is wanted
	evictions atomic.Int32
}

var lastWanted = lockkey.Name{ID: lockkey.ID{Number: -1 << 63}}

func (s *heldSession) Had(id lockkey.ID) bool { return s.known.Has(id) }
func (s *heldSession) Evicted()               { s.evictions.Add(1) }
func (*heldSession) Unpublished() []string    { return nil }

func (*heldSession) WakesOnRelease(lockkey.ID) bool { return false }
func (s *heldSession) Wanted(name lockkey.Name) {
	if name == lastWanted {
		s.last <- struct{}{}
		return
	}
	s.wanted = append(s.wanted, name)
}

// Any role may send notifications. Here the mutex is held meanwhile: a notification that took it
// would not be over.
func TestForgedNotificationTakesNoMutexAndIsNotRemembered(t *testing.T) {
	t.Parallel()
	q := newQueue(runs(func(dbconn.Exchange) error { return errors.New("a statement was sent") }))
	held, waited := lockkey.Name{ID: lockkey.ID{Number: 1}}, lockkey.Name{Key: "k"}
	session, leader := &heldSession{}, &someone{looked: make(chan struct{}, 10)}
	session.known.Add(held.ID)
	q.server.Session, q.server.Leaders = session, leader
	handle := func(channel, payload string) {
		q.listener.handle(&pgconn.Notification{Channel: channel, Payload: payload})
	}
	const here, holder, leaders = "pgxlock_7", "pgxlock_holder_7", "pgxlock_step_down"
	w := q.join(waited, &hold.Busy{}, nil, hold.Exclusive)
	defer w.leave()
	handled := make(chan struct{})
	q.mu.Lock()
	go func() {
		defer close(handled)
		for i := range 10_000 {
			for _, form := range []string{"1:0:forged %d", "9:1:%d00", "1:2:%d", "1:1:x%d", "%d", "1%d:0:k", "%d0:1:1", "1,%d:1:1", "1:evict%d", "1:0:k:%d"} {
				handle(here, fmt.Sprintf(form, i+1))
				handle(holder, fmt.Sprintf(form, i+1))
				handle(leaders, fmt.Sprintf(form, i+1))
			}
			for _, payload := range []string{"", ":", "1", "0:", "0:k", "1:1", "0:0:k", "0:1:1", ":0:k", "-1:1:1", " 1:1:1", "a:1:1", "01:1:1", "evict", ":evict", "0:evict"} {
				handle(here, payload)
				handle(holder, payload)
				handle(leaders, payload)
			}
			handle(holder, "1:0:k") // a lease has no session that holds it
			handle(here, "1:1:1")   // no caller waits for it
		}
	}()
	pgtest.Receive(t, "the forged notifications are handled while the mutex is held", handled)
	n := len(q.others) + len(q.tickets) + len(q.queued) + len(q.woken) + len(q.handed) + len(w.woken)
	q.mu.Unlock()
	if n != 0 || len(session.wanted) != 0 || session.evictions.Load() != 0 || len(leader.looked) != 0 {
		t.Errorf("%d things are remembered, %v is wanted, %d evictions and %d leaders are looked for", n, session.wanted, session.evictions.Load(), len(leader.looked))
	}
	for i, protocol := range []string{"1", "2", "9"} {
		session.wanted = nil
		handle(holder, protocol+":1:1")
		handle(here, protocol+":0:k")
		handle(holder, protocol+":evict")
		handle(leaders, protocol+":")
		if !slices.Equal(session.wanted, []lockkey.Name{held}) || len(w.woken) != 1 || int(session.evictions.Load()) != i+1 || len(leader.looked) != i+1 {
			t.Errorf("of true notifications of protocol %s: %v is wanted, %d signals for the waiter, %d evictions and %d leaders are looked for",
				protocol, session.wanted, len(w.woken), session.evictions.Load(), len(leader.looked))
		}
		for len(w.woken) > 0 {
			<-w.woken
		}
	}
}

// Not parallel: it counts what the whole process allocates.
func TestFloodOfNotificationsCostsTheirReceiptAndHidesNoTrueOne(t *testing.T) {
	pgtest.Long(t)
	const flood, pid = 200_000, 4711
	db := newDB(t)
	q := connected(t, db, nobody{})
	session := &heldSession{last: make(chan struct{}, 1)}
	session.known.Add(lastWanted.ID)
	var held []lockkey.Name
	for i := range int64(100) {
		held = append(held, lockkey.Name{ID: lockkey.ID{Number: -i}})
		session.known.Add(held[i].ID)
	}
	q.server.Session = session
	q.Listen(pid)
	pgtest.Until(t, "the Queue listens for the holder", func() bool {
		db.Exec(t, "select pg_notify($1, $2)", fmt.Sprintf("pgxlock_holder_%d", pid), "1:"+evictNotice)
		return session.evictions.Load() > 0
	})
	var waiters []*position
	for i := range 100 {
		waiters = append(waiters, q.join(lockkey.Name{Key: fmt.Sprintf("k%d", i)}, &hold.Busy{}, nil, hold.Exclusive))
	}
	client := q.client.Load()
	last := fmt.Sprintf("1:1:%d", lastWanted.ID.Number)
	send := func(holder, client string) {
		t.Helper()
		db.Exec(t, `select count(case when i % 2000 = 0 then concat(pg_notify($1, '1:1:-' || i / 2000), pg_notify($2, '1:0:k' || i / 2000))
		                              else concat(pg_notify(case i % 3 when 0 then $2 else $1 end, concat_ws(':', 1 + i % 9, 1 + i % 2, i))) end)
		              from generate_series(0, $3 - 1) as i`, holder, client, flood)
		db.Exec(t, "select pg_notify($1, $2)", holder, last)
	}
	mallocs := func(do func()) uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		do()
		runtime.ReadMemStats(&after)
		return after.Mallocs - before.Mallocs
	}

	bare := db.Connect(t)
	if _, err := bare.Exec(t.Context(), `listen bare_holder; listen bare_client`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	least := mallocs(func() {
		send("bare_holder", "bare_client")
		for {
			n, err := bare.WaitForNotification(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if n.Payload == last {
				return
			}
		}
	})
	got := mallocs(func() {
		send(fmt.Sprintf("pgxlock_holder_%d", pid), fmt.Sprintf("pgxlock_%d", client))
		pgtest.Receive(t, "the last notification is handled", session.last)
	})
	t.Logf("%d allocations, and %d of a bare listener", got, least)
	if got > 2*least {
		t.Errorf("%d allocations, and %d of a bare listener", got, least)
	}
	if !slices.Equal(session.wanted, held) {
		t.Errorf("%d locks are wanted, and not the %d that are", len(session.wanted), len(held))
	}
	q.mu.Lock()
	if n := len(q.others); n != len(held)+1 {
		t.Errorf("%d locks are taken for those of others, want %d", n, len(held)+1)
	}
	q.mu.Unlock()
	for i, w := range waiters {
		if len(w.woken) != 1 {
			t.Errorf("waiter %d was not woken", i)
		}
		w.leave()
	}
}
