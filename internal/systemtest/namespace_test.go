package systemtest_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
)

func TestNamespacesKeepAdvisoryLocksApart(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	of := func(namespace pgxlock.Namespace) *pgxlock.Locker {
		return testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Namespace: namespace})
	}
	billing, other := of("billing"), of("billing")
	lock := testkit.Acquire(t, billing, "k")
	testkit.Acquire(t, of("shop"), "k")
	plain := of("")
	testkit.Acquire(t, plain, "k")
	busy := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := other.TryAcquire(t.Context(), "k")
	busy("another Locker of the namespace", err)
	_, err = plain.TryAcquire(t.Context(), pgxlock.Namespace("billing").Key("k"))
	busy("a Locker without a namespace", err)
	for _, test := range []struct {
		namespace pgxlock.Namespace
		busy      bool
	}{{"billing", true}, {"shop", true}, {"mail", false}} {
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			return pgxlock.LockTx(t.Context(), tx, "k", pgxlock.NoWait, test.namespace)
		})
		if errors.Is(err, pgxlock.ErrNotAcquired) != test.busy || err != nil && !test.busy {
			t.Errorf("LockTx in %s: %v", test.namespace, err)
		}
		if free := testkit.Query[bool](t, db, "select pg_try_advisory_xact_lock(advisory_lock_key_in($1, 'k'))", string(test.namespace)); free == test.busy {
			t.Errorf("in SQL the lock of %s is free: %t", test.namespace, free)
		}
	}
	for _, key := range []string{pgxlock.RawKey(42), pgxlock.Namespace("shop").Key("k"), ""} {
		if _, err := billing.TryAcquire(t.Context(), key); err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%q: %v", key, err)
		}
	}
	if _, err := pgxlock.NewAdvisoryLocker(db.Pool, &pgxlock.AdvisoryConfig{Namespace: "a/b"}); err == nil {
		t.Error("a namespace with a / was taken")
	}
	if _, err := testkit.NewLocker(t, db, nil).TryAcquire(t.Context(), pgxlock.Namespace("billing").Key("k")); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a lease: %v", err)
	}
	if found, err := billing.Holders(t.Context(), "k"); err != nil || len(found) != 1 || found[0].Key != "k" || found[0].ID != lock.Holder() {
		t.Errorf("%v, %v", found, err)
	}

	// A waiter, and what operators see.
	granted := make(chan error, 1)
	go func() {
		_, err := other.Acquire(t.Context(), "k", pgxlock.MaxWait(pgtest.Patience))
		granted <- err
	}()
	m, err := monitor.New(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	var shot monitor.Snapshot
	pgtest.Until(t, "the names were published, and the wait is seen", func() bool {
		if shot, err = m.Snapshot(t.Context()); err != nil {
			t.Fatal(err)
		}
		holds := func(key string) bool {
			return slices.ContainsFunc(shot.Holders, func(h pgxlock.Holder) bool { return h.Key == key })
		}
		return holds("k") && holds("@shop/k") && holds("@billing/k") &&
			slices.ContainsFunc(shot.Waiters, func(w monitor.Waiter) bool { return w.Key == "@billing/k" })
	})
	found, err := m.Holders(t.Context(), monitor.Filter{Prefix: "@billing/"})
	if err != nil || len(found) != 1 || found[0].ID != lock.Holder() || found[0].LockKey() != pgxlock.Namespace("billing").Key("k") {
		t.Fatalf("%v, %v", found, err)
	}
	if again, err := m.Holders(t.Context(), monitor.Filter{Key: found[0].LockKey()}); err != nil || len(again) != 1 {
		t.Errorf("%v, %v", again, err)
	}
	if names := testkit.Query[[]string](t, db, "select array_agg(lock_name order by lock_name) from lock_holders"); !slices.Equal(names, []string{"@billing/k", "@shop/k", "k"}) {
		t.Errorf("the view shows %q", names)
	}
	if evicted, err := m.Evict(t.Context(), found[0], "test"); !evicted || err != nil {
		t.Errorf("%t, %v", evicted, err)
	}
	pgtest.Until(t, "the holder learns of the eviction", func() bool { return errors.Is(lock.Err(), pgxlock.ErrEvicted) })
	if err := <-granted; err != nil {
		t.Error(err)
	}
}
