package testkit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// NewLocker returns a Locker that is closed when the test is over. Unless cfg says otherwise,
// its TTL is [TTL].
func NewLocker(t *testing.T, db *pgtest.DB, cfg *pgxlock.LeaseConfig) *pgxlock.Locker {
	t.Helper()
	patient := pgxlock.LeaseConfig{}
	if cfg != nil {
		patient = *cfg
	}
	if patient.TTL == 0 {
		patient.TTL, patient.Renew = TTL, cmp.Or(patient.Renew, Renew)
	}
	locks, err := pgxlock.NewLeaseLocker(db.Pool, &patient)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return locks
}

// Advisory returns a Locker of the pool; the test closes it.
func Advisory(t *testing.T, pool *pgxpool.Pool, cfg *pgxlock.AdvisoryConfig) *pgxlock.Locker {
	t.Helper()
	locks, err := pgxlock.NewAdvisoryLocker(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

// NewAdvisory returns a Locker that is closed when the test is over.
func NewAdvisory(t *testing.T, db *pgtest.DB, cfg *pgxlock.AdvisoryConfig) *pgxlock.Locker {
	t.Helper()
	locks := Advisory(t, db.Pool, cfg)
	t.Cleanup(func() {
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return locks
}

// WaitingKinds are the kinds of Locker that wait for other processes. Nothing happens
// in time by their Backoff.
var WaitingKinds = map[string]func(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker{
	"leases": func(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
		t.Helper()
		return NewLocker(t, db, &pgxlock.LeaseConfig{Owner: owner, Backoff: Seldom})
	},
	"advisory locks": func(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
		t.Helper()
		return NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: owner, Backoff: Seldom})
	},
}

// Listening is a Lease Locker that hears of releases by others.
func Listening(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
	t.Helper()
	locks := WaitingKinds["leases"](t, db, owner)
	Hear(t, db, locks)
	return locks
}

// Semaphore returns a semaphore of n permits.
func Semaphore(t *testing.T, locks *pgxlock.Locker, n int) *pgxlock.Semaphore {
	t.Helper()
	s, err := locks.Semaphore(n)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Acquire acquires, which must work.
func Acquire(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) *pgxlock.Lock {
	t.Helper()
	lock, err := locks.Acquire(t.Context(), key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// AcquireMany acquires n leases at once.
func AcquireMany(t *testing.T, locks *pgxlock.Locker, n int) []*pgxlock.Lock {
	t.Helper()
	held := make([]*pgxlock.Lock, n)
	errs := make([]error, n)
	var acquiring sync.WaitGroup
	for i := range held {
		acquiring.Go(func() { held[i], errs[i] = locks.Acquire(t.Context(), fmt.Sprint("key:", i)) })
	}
	acquiring.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return held
}

// Permit acquires a permit.
func Permit(t *testing.T, s *pgxlock.Semaphore, key string, opts ...pgxlock.PermitOption) *pgxlock.Lock {
	t.Helper()
	lock, err := s.Acquire(t.Context(), key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// Release releases, which must work.
func Release(t *testing.T, lock *pgxlock.Lock) {
	t.Helper()
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Releasing calls Release, and returns its result once there is one. It waits
// until the server was asked for the release, and refused it, at least once.
func Releasing(t *testing.T, lock *pgxlock.Lock, asked *Counter) <-chan error {
	t.Helper()
	before, _, _ := asked.Counts()
	released := make(chan error, 1)
	go func() { released <- lock.Release(t.Context()) }()
	pgtest.Until(t, "the server was asked again for the release", func() bool {
		n, _, _ := asked.Counts()
		return n >= before+2
	})
	return released
}

// UseAdvisory acquires, renews and releases, and asks the server on the way who has
// the lock.
func UseAdvisory(t *testing.T, locks *pgxlock.Locker, db *pgtest.DB, key string) {
	t.Helper()
	for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
		lock := Acquire(t, locks, key, mode)
		if err := lock.Renew(t.Context()); err != nil {
			t.Errorf("Renew: %v", err)
		}
		WantFree(t, db, key, false)
		if found, err := locks.Holders(t.Context(), key); err != nil || len(found) != 1 || found[0].ID != lock.Holder() || found[0].Mode != mode {
			t.Errorf("Holders: %+v, %v", found, err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("Release: %v", err)
		}
		WantFree(t, db, key, true)
	}
	all, err := locks.AcquireAll(t.Context(), []string{key, "another", pgxlock.RawKey2(1, 2)}, pgxlock.NoWait)
	if err != nil {
		t.Errorf("AcquireAll: %v", err)
	}
	if err := all.Release(t.Context()); err != nil {
		t.Errorf("Release of all: %v", err)
	}
}

// HeldBy returns how many advisory locks the sessions of that owner have, without
// the one that each has for itself.
func HeldBy(t *testing.T, db *pgtest.DB, owner string) int {
	t.Helper()
	return Query[int](t, db, `select coalesce(sum(n - 1), 0) from (select count(*) as n from pg_locks l join pg_stat_activity a using (pid)
		where locktype = 'advisory' and granted and a.datname = current_database() and application_name = 'pgxlock ' || $1 group by pid) x`, owner)
}

// SQLKey is a key as the arguments of PostgreSQL's functions.
func SQLKey(key string) string {
	if raw, ok := strings.CutPrefix(key, "\x00#"); ok && strings.Contains(raw, ",") {
		return raw
	}
	return strconv.FormatInt(pgxlock.AdvisoryID(key), 10)
}
