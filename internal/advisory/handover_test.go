package advisory

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A recordingQueue is a queue of which the test sees what it was asked.
type recordingQueue struct {
	noQueue
	waitedFor bool // another process has a ticket for every lock
	contended bool // other processes were seen lately to have every lock

	mu    sync.Mutex
	woken []lockkey.Name
}

func (q *recordingQueue) Wake(names []lockkey.Name) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.woken = append(q.woken, names...)
}

func (q *recordingQueue) Contended(lockkey.Name) bool { return q.contended }

func (q *recordingQueue) WaitedFor(_ context.Context, names []lockkey.Name) []bool {
	return slices.Repeat([]bool{q.waitedFor}, len(names))
}

// wantWoken checks how often the queue was to wake the first ticket for the lock.
func (q *recordingQueue) wantWoken(t *testing.T, what string, want int) {
	t.Helper()
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.woken) != want {
		t.Errorf("%s: %d were woken, want %d", what, len(q.woken), want)
	}
}

// queueing returns a connected process with a queue that the test sees.
func queueing(t *testing.T) (*process, *recordingQueue) {
	t.Helper()
	p, q := connected(t, pgtest.New(t).Pool, Config{}), &recordingQueue{}
	p.host.Queue = q
	return p, q
}

// tryTurn tries once, as a caller with that position in the queue does.
func (p *process) tryTurn(t *testing.T, key string, turn hold.Turn) (*hold.Hold, *hold.Busy) {
	t.Helper()
	attempts := []hold.Attempt{{Hold: p.newHold(key, hold.Exclusive)}}
	p.Try(t.Context(), hold.Request{Turn: turn}, attempts)
	busy, isBusy := errors.AsType[*hold.Busy](attempts[0].Err)
	if attempts[0].Err != nil && !isBusy {
		t.Fatal(attempts[0].Err)
	}
	return attempts[0].Hold, busy
}

// A handingQueue leaves each lock to a caller that is next, which is the test.
type handingQueue struct {
	noQueue
	left  chan hold.Release
	leave func(hold.Release) // how it leaves at once; nil: it does not
	alone bool               // no caller elsewhere is known
}

func (q handingQueue) Contended(lockkey.Name) bool { return !q.alone }

func (q handingQueue) HandOver(_ lockkey.Name, r hold.Release) bool {
	if q.leave != nil {
		q.leave(r)
	}
	q.left <- r
	return true
}

func TestReleaseIsSentWithTheTryOfTheCallerThatIsNext(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, test := range map[string]struct {
		cfg  Config
		want int
	}{
		"function calls":    {Config{}, 1},
		"a batch":           {Config{SessionPooler: true}, 1},
		"nobody known else": {Config{}, 2}, // so that pollers elsewhere find it free
	} {
		p, q := connected(t, db.Pool, test.cfg), handingQueue{left: make(chan hold.Release, 1), alone: test.want == 2}
		p.host.Queue = q
		sent := func() int {
			p.mux.mu.Lock()
			defer p.mux.mu.Unlock()
			return p.mux.sends
		}
		lock := mustAcquire(t, p, name, hold.Exclusive)
		before, released := sent(), make(chan error, 1)
		go func() { released <- lock.release() }()
		turn := hold.Turn{Handed: true, Release: <-q.left}
		if q.alone {
			pgtest.Until(t, "the release is sent", func() bool { return sent() > before })
		}
		if _, busy := p.tryTurn(t, name, turn); busy != nil {
			t.Fatalf("%s: refused: %+v", name, busy)
		}
		if err := pgtest.Receive(t, "the end of the release", released); err != nil {
			t.Errorf("%s: release: %v", name, err)
		}
		if got := sent() - before; got != test.want {
			t.Errorf("%s: %d messages for a release and a try, want %d", name, got, test.want)
		}
	}
}

// Otherwise it would wait for another call, and the lock for its release.
func TestReleaseIsSentIfTheCallerThatIsNextLeaves(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	other := connected(t, db.Pool, Config{})
	for what, end := range map[string]func(p *process, left hold.Release) (want error){
		"the caller leaves at once": nil,
		"the caller leaves":         func(_ *process, left hold.Release) error { left.Return(); return nil },
		"it leaves after the Locker's closing": func(p *process, left hold.Release) error {
			p.closing()
			left.Return()
			return nil
		},
		"the Locker is closed": func(p *process, _ hold.Release) error { return p.Close(t.Context()) },
		"the session ends": func(p *process, left hold.Release) error {
			p.mu.Lock()
			p.end()
			p.mu.Unlock()
			pgtest.Until(t, "the end of the session", func() bool {
				p.mux.mu.Lock()
				defer p.mux.mu.Unlock()
				return p.mux.conn == nil
			})
			left.Return()
			return lockerr.ErrSessionEnded
		},
	} {
		p, q := connected(t, db.Pool, Config{TTL: -1}), handingQueue{left: make(chan hold.Release, 1)} // no ping sends it
		if end == nil {
			q.leave = func(left hold.Release) {
				left.Return()
				for range 1000 { // it comes as far as it can while the release is not queued
					runtime.Gosched()
				}
				pgtest.Until(t, what, func() bool {
					p.mux.mu.Lock()
					defer p.mux.mu.Unlock()
					return !p.mux.led || p.mux.idle
				})
			}
		}
		p.host.Queue = q
		lock, discarded := mustAcquire(t, p, what, hold.Exclusive), mustAcquire(t, p, what+" later", hold.Exclusive)
		released := make(chan error, 1)
		go func() { released <- lock.release() }()
		left := <-q.left
		discard := func() {
			p.Discard(discarded.Hold) // not before the release is queued
			<-q.left
		}
		var want error
		if end != nil {
			discard()
			want = end(p, left)
		}
		if err := pgtest.Receive(t, what+": the end of the release", released); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
		if end == nil {
			discard() // not before, because it sends what is queued
		}
		for _, key := range []string{what, what + " later"} {
			mustAcquire(t, other, key, hold.Exclusive)
		}
	}
}

func TestTurnRunsForTheWakeTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		waits, other := lockkey.ID{Number: 1}, lockkey.ID{Number: 2}
		running := make(turns)
		running.begin(waits)
		time.Sleep(clock.WakeTimeout - 1)
		if !running.last(waits) || running.last(other) {
			t.Errorf("just before its end: %t; of a lock without a turn: %t", running.last(waits), running.last(other))
		}
		time.Sleep(time.Millisecond)
		if running.last(waits) {
			t.Error("it runs longer")
		}
		running.begin(other)
		if len(running) != 1 {
			t.Errorf("%d are kept, want the one that runs", len(running))
		}
	})
}

func TestWantedLockIsLeftToTheWaitersOfOtherProcesses(t *testing.T) {
	t.Parallel()
	p, q := queueing(t)
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	p.Wanted(lock.Queue)
	if _, busy := p.tryTurn(t, "k", hold.Turn{}); busy == nil || !busy.Here || !busy.Wanted {
		t.Errorf("a try while the lock is held: %+v", busy)
	}
	q.wantWoken(t, "before the release", 0)
	if err := lock.release(); err != nil {
		t.Fatal(err)
	}
	q.wantWoken(t, "after the release", 1)
	p.mu.Lock()
	if p.yielded[lock.Queue.ID].IsZero() {
		t.Error("no turn of other processes began")
	}
	p.yielded[lock.Queue.ID] = time.Now().Add(time.Hour) // however slow the test is
	p.mu.Unlock()
	if _, busy := p.tryTurn(t, "k", hold.Turn{}); busy == nil || !busy.Left {
		t.Errorf("a try of a caller that has not queued: %+v", busy)
	}
	for name, turn := range map[string]hold.Turn{"of the first ticket": {Ticket: 1, First: true}, "that passes the queue": {SkipQueue: true}} {
		got, busy := p.tryTurn(t, "k", turn)
		if busy != nil {
			t.Fatalf("a try %s: %+v", name, busy)
		}
		if err := p.Release(got); err != nil {
			t.Error(err)
		}
	}
}

func TestReleaseWakesWhereTheLockIsWantedAndHeldExclusively(t *testing.T) {
	t.Parallel()
	p, _ := queueing(t)
	for _, c := range []struct {
		mode          hold.Mode
		wanted, wakes bool
	}{
		{hold.Exclusive, true, true},
		{hold.Exclusive, false, false},
		{hold.Shared, true, false}, // a waiter may share it at once
	} {
		lock := mustAcquire(t, p, "k", c.mode)
		if c.wanted {
			p.Wanted(lock.Queue)
		}
		if got := p.WakesOnRelease(lock.Queue.ID); got != c.wakes {
			t.Errorf("%v, wanted %t: %t, want %t", c.mode, c.wanted, got, c.wakes)
		}
		if err := lock.release(); err != nil {
			t.Fatal(err)
		}
		if p.WakesOnRelease(lock.Queue.ID) {
			t.Errorf("%v, wanted %t: it wakes when it was released", c.mode, c.wanted)
		}
	}
}

func TestLockIsWantedFromItsGrantWhereOtherProcessesCompete(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p, q := queueing(t)
	for _, c := range []struct {
		name             string
		mode             hold.Mode
		turn             hold.Turn
		competed, wanted bool
	}{
		{"with a ticket", hold.Exclusive, hold.Turn{Ticket: 1, First: true}, true, true},
		{"without a ticket", hold.Exclusive, hold.Turn{}, true, true},
		{"shared, with a ticket", hold.Shared, hold.Turn{Ticket: 1, First: true}, true, true},
		{"shared, without a ticket", hold.Shared, hold.Turn{}, true, false},
		{"no other process competes", hold.Exclusive, hold.Turn{Ticket: 1, First: true}, false, false},
	} {
		q.contended = c.competed
		attempts := []hold.Attempt{{Hold: p.newHold(c.name, c.mode)}}
		if p.Try(t.Context(), hold.Request{Mode: c.mode, Turn: c.turn}, attempts); attempts[0].Err != nil {
			t.Fatalf("%s: %v", c.name, attempts[0].Err)
		}
		lock := attempts[0].Hold
		if _, busy := p.tryTurn(t, c.name, hold.Turn{}); busy == nil || busy.Wanted != c.wanted {
			t.Errorf("%s: a try while the lock is held: %+v", c.name, busy)
		}
		if err := p.Release(lock); err != nil {
			t.Error(err)
		}
		q.mu.Lock()
		woken := slices.Contains(q.woken, lock.Queue)
		q.mu.Unlock()
		if woken != c.wanted {
			t.Errorf("%s: the release woke a waiter: %t", c.name, woken)
		}
	}
}

func TestSharedLockThatIsWantedAdmitsNoLaterReader(t *testing.T) {
	t.Parallel()
	p, _ := queueing(t)
	lock := mustAcquire(t, p, "k", hold.Shared)
	p.Wanted(lock.Queue)
	attempts := []hold.Attempt{{Hold: p.newHold("k", hold.Shared)}}
	p.Try(t.Context(), hold.Request{Mode: hold.Shared}, attempts)
	if busy, ok := errors.AsType[*hold.Busy](attempts[0].Err); !ok || !busy.Wanted {
		t.Errorf("%v, want that it is busy", attempts[0].Err)
	}
}

func TestWantedLockThatIsGoneWakesTheNextWaiterOnce(t *testing.T) {
	t.Parallel()
	p, q := queueing(t)
	name := lockkey.Name{ID: lockkey.Identify("k")}
	p.Wanted(name)
	q.wantWoken(t, "the first time", 1)
	p.mu.Lock()
	if p.wakes[name.ID].IsZero() || p.yielded[name.ID].IsZero() {
		t.Error("no turn of other processes began")
	}
	p.wakes[name.ID] = time.Now().Add(time.Hour) // however slow the test is
	p.mu.Unlock()
	p.Wanted(name)
	q.wantWoken(t, "again in that turn", 1)
}

// A waiter notifies the holder, which may release the lock meanwhile.
func TestReleasedLockIsKnownWhileANotificationMayBeOnItsWay(t *testing.T) {
	t.Parallel()
	p, _ := queueing(t)
	want := func(when, key string, want bool) {
		t.Helper()
		if got := p.Had(lockkey.Identify(key)); got != want {
			t.Errorf("%s: %q is known: %t", when, key, got)
		}
	}
	want("before the try", "k", false)
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	want("while it is held", "k", true)
	if err := lock.release(); err != nil {
		t.Fatal(err)
	}
	want("after the release", "k", true)
	p.mu.Lock()
	p.known.Forget(lock.Queue.ID, 0) // the time is over
	p.mu.Unlock()
	want("later", "k", false)
	want("always", "another", false)
}

func TestTryToShareIsRefusedWhereAnotherProcessWaits(t *testing.T) {
	t.Parallel()
	p, q := queueing(t)
	q.waitedFor = true
	if _, err := p.try(t.Context(), "k", hold.Shared); err == nil {
		t.Error("it passed a writer that waits")
	}
	q.waitedFor = false
	if _, err := p.try(t.Context(), "k", hold.Shared); err != nil {
		t.Error(err)
	}
}
