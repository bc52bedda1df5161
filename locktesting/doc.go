// Package locktesting tests what a program does when a lock is lost, late, refused or held by
// another process. [New] returns a [pgxlock.Locker] without a server, for the code under test,
// and a [Control], with which the test decides what happens to the locks:
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
// # What happens to a lock
//
//	                  acquire                            Lose, TakeOver
//	free, or held ──────────────▶ held by a Lock ─────────────────────▶ lost at once
//	   ▲     │  Refuse: an error    │        │  Expire: no more renewals
//	   │     │  Delay: late         │ Release└───────────▶ lost at the local deadline,
//	   │     │                      ▼                      and free a margin later
//	   │     └─ Hold ───▶ held by another process, until the test releases it
//	   └──────────────────────────────────────────────────────────────────┘
//
// The locks are like leases of [pgxlock.NewLeaseLocker]. They have its TTL, deadline, renewals,
// holder ids and tokens, emit its events, and end with its errors. In a testing/synctest bubble
// all times are exact and cost nothing. Elsewhere they pass, and a TTL is at least a second.
//
// As from [pgxlock.NewMemoryLocker], [pgxlock.Locker.Kind] is [pgxlock.KindMemory], the locks
// exclude only calls of their Locker and the other processes of [Control.Hold], and
// [pgxlock.Lock.Fence] of a lock that is held fails with [errors.ErrUnsupported]. That of a lost
// lock fails with [pgxlock.ErrLost].
//
// Renewals are timers. So a bubble in which a lock is held never counts as deadlocked: time goes
// on until the test's own time limit ends it.
package locktesting
