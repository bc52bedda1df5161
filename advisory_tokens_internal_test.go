package pgxlock

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestALockerReapsWhatDeadSessionsLeftAndNothingOfItsOwn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	locks, a := advisoryWire(t, db.Pool, &AdvisoryConfig{Tokens: true})
	lock, err := locks.TryAcquire(t.Context(), "held")
	if err != nil {
		t.Fatal(err)
	}
	dead, d := advisoryWire(t, db.Pool, &AdvisoryConfig{Tokens: true})
	if _, err := dead.TryAcquire(t.Context(), "left"); err != nil {
		t.Fatal(err)
	}
	var ended bool
	if err := db.Pool.QueryRow(t.Context(), "select pg_terminate_backend($1, 10000)", d.pid).Scan(&ended); err != nil || !ended {
		t.Fatal(ended, err)
	}
	if err := a.reap(); err != nil {
		t.Fatal(err)
	}
	rows, _ := db.Pool.Query(t.Context(), "select key_id from pgxlock_advisory_locks")
	if keys, err := pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil || len(keys) != 1 || keys[0] != AdvisoryID("held") {
		t.Errorf("the rows that are left are of %d, %v", keys, err)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) })
	if err != nil {
		t.Error(err)
	}
}
