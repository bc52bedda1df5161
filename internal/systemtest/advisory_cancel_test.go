package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Waits for advisory locks end here around the moment of their grant, when a lock that no
// caller owns would be left behind.

// A crowd is callers of one Locker whose contexts end at random moments: at times
// spread around what a grant takes, and in the very moments in which a message is
// sent and its answer comes in.
type crowd struct {
	locks, others *pgxlock.Locker // others is another Locker on the same database
	pool          *pgxpool.Pool   // of locks
	tap           *tap
	callers       []crowdCaller

	keys    []string // the first ones are only ever locked one at a time, and Exclusive
	index   map[int64]int
	inUse   []atomic.Int32 // who has each key: those who share it, and many more for one who does not
	grant   atomic.Int64   // how long a grant takes, in nanoseconds
	leading atomic.Int64   // how many contexts ended while their caller itself was sending or reading
	waiting atomic.Int64   // and while another one was

	mu       sync.Mutex
	outcomes [crowdOutcomes]int
	released int // of the first keys
}

type crowdCaller struct {
	goroutine atomic.Uint64
	cancel    atomic.Pointer[context.CancelFunc] // for the tap to call
}

type crowdOutcome int

const (
	crowdRefused crowdOutcome = iota // the context had ended before the call
	crowdGranted
	crowdGrantedLate // the context had ended when the call returned
	crowdEnded       // by the context, before the server had said anything
	crowdEndedBusy   // by the context, after it had said busy
	crowdBusy        // with NoWait, or when MaxWait was over
	crowdUnheard     // MaxWait was over before the server had said anything
	crowdOutcomes
)

const (
	crowdSingles = 20 // these keys are locked one at a time, and Exclusive
	crowdMany    = 40 // those before this one are locked one at a time, those from crowdSingles also otherwise
	crowdKeys    = 60
	crowdOne     = 1 << 16 // in inUse: an exclusive holder
)

func newCrowd(t *testing.T, db *pgtest.DB, size int) *crowd {
	t.Helper()
	brief := func(int) time.Duration { return time.Duration(rand.Int64N(int64(2 * time.Millisecond))) }
	tap, pool := tappedPool(t, db)
	c := &crowd{pool: pool, tap: tap, callers: make([]crowdCaller, size), inUse: make([]atomic.Int32, crowdKeys), index: make(map[int64]int)}
	c.locks = testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{Owner: "crowd", Backoff: brief})
	c.others = testkit.Advisory(t, db.NewPool(t), &pgxlock.AdvisoryConfig{Owner: "others", Backoff: brief})
	for i := range crowdKeys {
		key := pgxlock.RawKey(int64(i))
		if i%2 == 1 {
			key = pgxlock.RawKey2(-7, int32(i))
		}
		c.keys = append(c.keys, key)
		c.index[pgxlock.AdvisoryID(key)] = i
	}
	c.grant.Store(int64(time.Millisecond))
	tap.passing = c.passing
	return c
}

// passing ends somebody's context, be it the leader's, just when something passes.
func (c *crowd) passing(goroutine uint64) {
	if rand.IntN(3) == 0 {
		return
	}
	victim := &c.callers[rand.IntN(len(c.callers))]
	if rand.IntN(2) == 0 {
		for i := range c.callers {
			if c.callers[i].goroutine.Load() == goroutine {
				victim = &c.callers[i]
			}
		}
	}
	cancel := victim.cancel.Swap(nil)
	if cancel == nil {
		return
	}
	if victim.goroutine.Load() == goroutine {
		c.leading.Add(1)
	} else {
		c.waiting.Add(1)
	}
	(*cancel)()
	if rand.IntN(2) == 0 {
		runtime.Gosched() // it is seen before what passes, or after
	}
}

// enter and leave look that nobody is in where another one is.
func (c *crowd) enter(t *testing.T, key int, mode pgxlock.Mode) {
	if mode == pgxlock.Shared {
		if n := c.inUse[key].Add(1); n >= crowdOne {
			t.Errorf("key %d is shared beside an exclusive holder", key)
		}
	} else if n := c.inUse[key].Add(crowdOne); n != crowdOne {
		t.Errorf("key %d was granted while others had it: %#x", key, n)
	}
}

func (c *crowd) leave(key int, mode pgxlock.Mode) {
	if mode == pgxlock.Shared {
		c.inUse[key].Add(-1)
	} else {
		c.inUse[key].Add(-crowdOne)
	}
}

// call locks something, and may be disturbed.
func (c *crowd) call(ctx context.Context, t *testing.T, self *crowdCaller, dice *rand.Rand) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	around := func() time.Duration { return time.Duration(dice.Int64N(2 * c.grant.Load())) }
	var opts []pgxlock.AcquireOption
	bounded := false
	switch dice.IntN(10) {
	case 0:
		cancel()
	case 1:
		ctx, cancel = context.WithTimeout(ctx, around()/time.Duration(1+1000*dice.IntN(2))) // also 0
		defer cancel()
	case 2:
		defer time.AfterFunc(around(), cancel).Stop()
	case 3:
		opts, bounded = append(opts, pgxlock.MaxWait(around()+1)), true
	case 4:
		opts, bounded = append(opts, pgxlock.NoWait), true
	case 5:
		c.measure(t, dice)
		return
	default:
		self.cancel.Store(&cancel)
		defer self.cancel.Store(nil)
	}
	locks := c.locks
	if dice.IntN(8) == 0 {
		locks = c.others
	}
	late := ctx.Err() != nil
	c.count(ctx, t, late, bounded, c.lock(ctx, t, locks, dice, opts))
}

// lock is a call in one of its forms. What is granted is given back under the
// same context.
func (c *crowd) lock(ctx context.Context, t *testing.T, locks *pgxlock.Locker, dice *rand.Rand, opts []pgxlock.AcquireOption) error {
	mode := pgxlock.Exclusive
	keys := dice.Perm(crowdMany)[:1]
	if dice.IntN(2) == 0 {
		keys = dice.Perm(crowdKeys - crowdSingles)[:1+dice.IntN(4)]
		for i := range keys {
			keys[i] += crowdSingles
		}
		mode = pgxlock.Mode(dice.IntN(2))
		opts = append(opts, mode)
	}
	if len(keys) > 1 {
		names := make([]string, len(keys))
		for i, key := range keys {
			names[i] = c.keys[key]
		}
		all, err := locks.AcquireAll(ctx, names, opts...)
		if err == nil {
			c.use(ctx, t, mode, keys)
			if err := all.Release(ctx); err != nil {
				t.Errorf("Release: %v", err)
			}
		}
		return err
	}
	key := keys[0]
	var err error
	if dice.IntN(3) == 0 {
		err = locks.Do(ctx, c.keys[key], func(ctx context.Context, _ *pgxlock.Lock) error {
			c.use(ctx, t, mode, keys)
			return nil
		}, opts...)
	} else {
		var lock *pgxlock.Lock
		lock, err = locks.Acquire(ctx, c.keys[key], opts...)
		if err == nil {
			work, _ := lock.Context(ctx) // and nobody cancels it
			c.use(work, t, mode, keys)
			if err := lock.Release(ctx); err != nil {
				t.Errorf("Release: %v", err)
			}
		}
	}
	if err == nil && key < crowdSingles && locks == c.locks {
		c.mu.Lock()
		c.released++
		c.mu.Unlock()
	}
	return err
}

// use is the work under a lock.
func (c *crowd) use(ctx context.Context, t *testing.T, mode pgxlock.Mode, keys []int) {
	for _, key := range keys {
		c.enter(t, key, mode)
	}
	runtime.Gosched()
	if errors.Is(context.Cause(ctx), pgxlock.ErrLost) {
		t.Error("a lock was lost")
	}
	for _, key := range keys {
		c.leave(key, mode)
	}
}

// measure locks what nobody else wants.
func (c *crowd) measure(t *testing.T, dice *rand.Rand) {
	began := time.Now()
	lock, err := c.locks.Acquire(t.Context(), fmt.Sprint("measured:", dice.Uint64()))
	if err != nil {
		t.Error(err)
		return
	}
	c.grant.Store((3*c.grant.Load() + int64(time.Since(began))) / 4)
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// count looks at what became of a call: late says that its context had ended before
// it, bounded that MaxWait or NoWait may have ended it.
func (c *crowd) count(ctx context.Context, t *testing.T, late, bounded bool, err error) {
	busy, ended := errors.Is(err, pgxlock.ErrNotAcquired), ctx.Err() != nil && errors.Is(err, ctx.Err())
	var outcome crowdOutcome
	switch {
	case late && ended && !busy:
		outcome = crowdRefused
	case late:
		t.Errorf("the context had ended before: %v", err)
	case err == nil && ctx.Err() == nil:
		outcome = crowdGranted
	case err == nil:
		outcome = crowdGrantedLate
	case busy && ended:
		outcome = crowdEndedBusy
	case ended:
		outcome = crowdEnded
	case busy && bounded:
		outcome = crowdBusy
	case bounded:
		outcome = crowdUnheard
	default:
		t.Errorf("nothing ended the wait, and yet: %v", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomes[outcome]++
}

// intrude is a session of plain SQL that locks the same numbers.
func (c *crowd) intrude(t *testing.T, conn *pgx.Conn, done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		default:
		}
		key := rand.IntN(crowdKeys)
		args := fmt.Sprintf("(%d)", key)
		if key%2 == 1 {
			args = fmt.Sprintf("(-7, %d)", key)
		}
		var granted, held bool
		err := conn.QueryRow(t.Context(), "select pg_try_advisory_lock"+args).Scan(&granted)
		if granted {
			c.enter(t, key, pgxlock.Exclusive)
			c.leave(key, pgxlock.Exclusive)
			err = conn.QueryRow(t.Context(), "select pg_advisory_unlock"+args).Scan(&held)
		}
		if err != nil || held != granted {
			t.Errorf("plain SQL: held %t, granted %t, %v", held, granted, err)
			return
		}
	}
}

// givenBack returns how many grants of the first keys the server was told to take
// back because nobody waited for them any more.
func (c *crowd) givenBack() int {
	c.mu.Lock()
	n := -c.released
	c.mu.Unlock()
	for _, m := range c.tap.since(0) {
		for _, a := range m.asks {
			if key, known := c.index[a.key]; known && key < crowdSingles && a.unlocks() {
				n++
			}
		}
	}
	return n
}

// rarest returns how often that came about which came about least.
func (c *crowd) rarest() int {
	c.mu.Lock()
	outcomes := c.outcomes
	c.mu.Unlock()
	return min(slices.Min(outcomes[:]), int(c.leading.Load()), int(c.waiting.Load()), c.givenBack())
}

// advisoryRows returns how many advisory locks the server knows of.
func advisoryRows(t *testing.T, db *pgtest.DB) int {
	t.Helper()
	return testkit.Query[int](t, db, `select count(*) from pg_locks
		where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`)
}

// Not parallel: it counts goroutines, and others must have none meanwhile.
func TestSoakWaitLeaksNothingWhateverEndsItAroundItsGrant(t *testing.T) {
	pgtest.Long(t)
	workers, calls := 32, pgtest.Soak(t, 2_400, 100_000)
	few := calls / 400
	before := len(goroutines())
	db := pgtest.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Patience) // of a wait that never ends
	defer cancel()
	c := newCrowd(t, db, workers)
	if err := testkit.Acquire(t, c.locks, "warm").Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	session := testkit.Backends(t, db, "crowd")

	over := make(chan struct{})
	var intruding, working sync.WaitGroup
	conn := db.Connect(t)
	intruding.Go(func() { c.intrude(t, conn, over) })
	for w := range workers {
		working.Go(func() {
			self, dice := &c.callers[w], rand.New(rand.NewPCG(uint64(w), 5))
			self.goroutine.Store(goroutine())
			for more := true; more && ctx.Err() == nil; more = c.rarest() < few { // on a slow machine it may take more calls
				for range calls / workers {
					c.call(ctx, t, self, dice)
				}
			}
			ctx, cancel := context.WithCancel(ctx)
			defer cancel() // the lock outlives it
			if _, err := c.locks.Acquire(ctx, fmt.Sprint("kept:", w)); err != nil {
				t.Error(err)
			}
		})
	}
	working.Wait()
	close(over)
	intruding.Wait()
	if ctx.Err() != nil {
		t.Fatalf("within %s some wait did not end, or something came about less than %d times: the ends were not all around the grants; the server knows of %d locks", pgtest.Patience, few, advisoryRows(t, db))
	}

	t.Logf("a grant took %s; granted %d, though the context had ended %d; ended before the call %d, before any answer %d, when it was busy %d; busy %d, unheard %d",
		time.Duration(c.grant.Load()), c.outcomes[crowdGranted], c.outcomes[crowdGrantedLate], c.outcomes[crowdRefused],
		c.outcomes[crowdEnded], c.outcomes[crowdEndedBusy], c.outcomes[crowdBusy], c.outcomes[crowdUnheard])
	if err := c.others.Close(t.Context()); err != nil {
		t.Error(err)
	}
	pgtest.Until(t, "the server knows of what is kept only, and of the session's own lock", func() bool { return advisoryRows(t, db) == workers+1 })
	t.Logf("%d messages; contexts that ended while their caller led %d, while another one did %d; released %d, given back because nobody waited %d",
		c.tap.count(), c.leading.Load(), c.waiting.Load(), c.released, c.givenBack())
	if now := testkit.Backends(t, db, "crowd"); len(now) != 1 || now[0] != session[0] || c.tap.dials() != 1 {
		t.Errorf("the backend was %v, and now is %v; dialled %d times", session, now, c.tap.dials())
	}
	if err := testkit.Acquire(t, c.locks, "after").Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := c.locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if n := c.pool.Stat().NewConnsCount(); n != 0 {
		t.Errorf("the caller's pool made %d connections, which it was never asked for", n)
	}
	if err := c.pool.Ping(t.Context()); err != nil || c.pool.Stat().AcquiredConns() != 0 {
		t.Errorf("the caller's pool: %v, %d connections are not back", err, c.pool.Stat().AcquiredConns())
	}
	pgtest.Until(t, "the server knows of no advisory lock", func() bool { return advisoryRows(t, db) == 0 })
	pgtest.Until(t, "no goroutine is left", func() bool { return len(goroutines()) <= before })
}
