package stacks_test

import (
	"database/sql"
	"errors"
	"testing"

	"github.com/pgxlock/pgxlock"
)

// asked makes the first lock on a database, which asks the server whether it keeps locks.
func asked(t *testing.T, db *sql.DB) {
	t.Helper()
	tx := readCommitted(t, db)
	lock(t, tx)
	goesOn(t, tx)
}

func TestLockIsOneRoundTripAndARefusalAfterAWaitIsTwo(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		p, connString := newProxy(t)
		db, direct := d.openURL(t, connString), d.open(t)
		asked(t, db)
		for _, test := range []struct {
			name        string
			opts        []pgxlock.LockTxOption
			level       sql.IsolationLevel
			trips, busy int // 0: not tried while it is busy
		}{
			{name: "no bound", trips: 1},
			{name: "shared", opts: []pgxlock.LockTxOption{pgxlock.Shared}, trips: 1},
			{name: "NoWait", opts: []pgxlock.LockTxOption{pgxlock.NoWait}, trips: 1, busy: 1},
			{name: "shared NoWait", opts: []pgxlock.LockTxOption{pgxlock.Shared, pgxlock.NoWait}, trips: 1, busy: 1},
			{name: "MaxWait", opts: []pgxlock.LockTxOption{aMoment}, trips: 1, busy: 2},
			{name: "shared MaxWait", opts: []pgxlock.LockTxOption{pgxlock.Shared, aMoment}, trips: 1, busy: 2},
			{
				name: "stale snapshot allowed", opts: []pgxlock.LockTxOption{pgxlock.AllowStaleSnapshot(true), aMoment},
				level: sql.LevelRepeatableRead, trips: 1, busy: 2,
			},
		} {
			t.Run(test.name, func(t *testing.T) {
				free := begin(t, db, test.level)
				if n := p.during(func() { lock(t, free, test.opts...) }); n != test.trips {
					t.Errorf("free: %d round trips, want %d", n, test.trips)
				}
				goesOn(t, free)
				if test.busy == 0 {
					return
				}
				lock(t, readCommitted(t, direct))
				busy := begin(t, db, test.level)
				if n := p.during(func() { refused(t, busy, test.opts...) }); n != test.busy {
					t.Errorf("busy: %d round trips, want %d", n, test.busy)
				}
				goesOn(t, busy)
			})
		}
	})
}

// Above READ COMMITTED another round trip asks whether the snapshot is stale, and brings the
// transaction back if it is.
func TestStaleSnapshotIsFoundInAFewRoundTrips(t *testing.T) {
	withEachDriver(t, func(t *testing.T, d driver) {
		p, connString := newProxy(t)
		db, direct := d.openURL(t, connString), d.open(t)
		asked(t, db)
		for _, test := range []struct {
			opts []pgxlock.LockTxOption
			want int
		}{
			{nil, 3}, // what locks one key in READ COMMITTED is asked first
			{[]pgxlock.LockTxOption{pgxlock.NoWait}, 2},
			{[]pgxlock.LockTxOption{aMoment}, 2},
		} {
			tx := begin(t, db, sql.LevelRepeatableRead)
			exec(t, tx, "SELECT count(*) FROM bookings")
			commit(t, direct)
			n := p.during(func() {
				if err := pgxlock.LockSQLTx(t.Context(), tx, t.Name(), test.opts...); !errors.Is(err, pgxlock.ErrStaleSnapshot) {
					t.Errorf("%v: got %v", test.opts, err)
				}
			})
			if n != test.want {
				t.Errorf("%v: %d round trips, want %d", test.opts, n, test.want)
			}
			goesOn(t, tx)
		}
	})
}
