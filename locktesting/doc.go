// Package locktesting provides a Locker for tests of programs that lock: the test decides when a
// lock is lost, a request is late or refused, or another process holds a key. [New] returns a
// [pgxlock.Locker] without a server, for the code under test, and a [Control] for the test:
//
//	func TestWorkerStops(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) {
//			locks, control := locktesting.New(t, nil)
//			stopped := make(chan error)
//			go func() { stopped <- work(t.Context(), locks) }()
//			synctest.Wait() // until it has the lock, and works
//			control.Lose("job", nil)
//			if err := <-stopped; !errors.Is(err, pgxlock.ErrLost) {
//				t.Errorf("work returned %v", err)
//			}
//		})
//	}
//
// # The life of a lock
//
//	free ───── acquire ─────▶ held by a Lock ───── Lose, TakeOver ─────▶ lost at once
//	 │ ▲                       │     │
//	 │ └─────── Release ───────┘     └── Expire: no more renewals ─────▶ lost at the local deadline
//	 │
//	 └── Hold ──▶ held by another process, until the test releases it
//
// [Control.Refuse] makes a request fail, and [Control.Delay] makes each request take time.
//
// The locks are like leases of [pgxlock.NewLeaseLocker]. They have its TTL, deadline, renewals,
// holder ids and tokens, emit its events, and end with its errors. In a testing/synctest bubble
// all times are exact and take no time. Outside a bubble they are real, and a TTL is at least a
// second.
//
// As from [pgxlock.NewMemoryLocker], [pgxlock.Locker.Kind] is [pgxlock.KindMemory], the locks
// exclude only calls of their Locker and the other processes of [Control.Hold], and
// [pgxlock.Lock.Fence] of a lock that is held fails with [errors.ErrUnsupported]. Fence of a lost
// lock fails with [pgxlock.ErrLost].
//
// Renewals are timers. So a bubble in which a lock is held never counts as deadlocked: its time
// goes on until the timeout of go test.
package locktesting
