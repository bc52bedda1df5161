//go:build unix

package pgxlock_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// frozenEnv makes this program the process that will be frozen: the test runs
// its own binary again.
const frozenEnv = "PGXLOCK_TEST_FROZEN_DATABASE"

func init() {
	if url := os.Getenv(frozenEnv); url != "" {
		if err := holdUntilLost(context.Background(), url, os.Getenv("PGXLOCK_TEST_FROZEN_KEY")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// frozenReport is what that process says: once when it holds the lease, and once
// when it knows that it does not.
type frozenReport struct {
	Token     int64
	LastHeld  time.Time // when the last look began that said "held"
	Unsettled []string  // what did not report the loss at once
	Fenced    string    // SQLSTATE of the fence of a zombie that does not look at all
}

// holdUntilLost holds a lease and does nothing but look at it, so that whenever
// it is stopped, a look is the first thing it does afterwards.
func holdUntilLost(ctx context.Context, url, key string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	locks, err := pgxlock.NewLease(pool, &pgxlock.LeaseConfig{TTL: time.Second, Owner: "frozen"})
	if err != nil {
		return err
	}
	lock, err := locks.Acquire(ctx, key)
	if err != nil {
		return err
	}
	work, cancel := lock.Context(ctx)
	defer cancel()
	child, cancelChild := context.WithTimeout(work, time.Hour)
	defer cancelChild()
	out := json.NewEncoder(os.Stdout)
	report := frozenReport{Token: lock.Token()}
	if err := out.Encode(report); err != nil {
		return err
	}

	for {
		began := time.Now()
		if work.Err() != nil {
			break
		}
		report.LastHeld = began
	}
	for what, err := range map[string]error{
		"cause":       context.Cause(work),
		"child cause": context.Cause(child),
		"Err":         lock.Err(),
		"Renew":       lock.Renew(ctx),
		"Release":     lock.Release(ctx),
		"Fence":       pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return lock.Fence(ctx, tx) }),
	} {
		if !errors.Is(err, pgxlock.ErrLost) {
			report.Unsettled = append(report.Unsettled, fmt.Sprintf("%s: %v", what, err))
		}
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "select assert_lock_held($1, $2, $3, true)", key, lock.Holder(), lock.Token())
		if err == nil {
			_, err = tx.Exec(ctx, "update written set by = 'zombie' where key = $1", key)
		}
		return err
	})
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		report.Fenced = pgErr.Code
	}
	return out.Encode(report)
}

func TestAFrozenHoldersFirstLookSeesTheLoss(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "create table written (key text primary key, by text not null)")
	rounds := 1
	if soak {
		rounds = 60
	}
	for i := range 4 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			others := newLocker(t, db, nil)
			for round := range rounds {
				freezeAndTakeOver(t, db, others, fmt.Sprintf("key:%d:%d", i, round))
			}
		})
	}
}

// freezeAndTakeOver freezes a holder until somebody else has its lease, and then
// asks it what it saw first.
func freezeAndTakeOver(t *testing.T, db *pgtest.DB, others *pgxlock.Locker, key string) {
	t.Helper()
	db.Exec(t, "insert into written values ($1, 'nobody')", key)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), frozenEnv+"="+db.URL, "PGXLOCK_TEST_FROZEN_KEY="+key)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reports := json.NewDecoder(bufio.NewReader(stdout))
	var held, lost frozenReport
	if err := reports.Decode(&held); err != nil {
		t.Fatal(err)
	}

	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	next, err := others.Acquire(t.Context(), key, pgxlock.MaxWait(30*time.Second))
	taken := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	if next.Token() <= held.Token {
		t.Errorf("token %d after %d", next.Token(), held.Token)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if err := next.Fence(t.Context(), tx); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), "update written set by = 'next' where key = $1", key)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := reports.Decode(&lost); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if lost.LastHeld.After(taken) {
		t.Errorf("%s: a look that began %s after somebody else had the lease said that it is held", key, lost.LastHeld.Sub(taken))
	}
	if len(lost.Unsettled) > 0 {
		t.Errorf("after the first look these did not report the loss: %q", lost.Unsettled)
	}
	if lost.Fenced != "LK001" {
		t.Errorf("the zombie's fence ended with SQLSTATE %q, want LK001", lost.Fenced)
	}
	var by string
	if err := db.Pool.QueryRow(t.Context(), "select by from written where key = $1", key).Scan(&by); err != nil || by != "next" {
		t.Errorf("written by %q, want by the next holder: %v", by, err)
	}
	if err := next.Err(); err != nil {
		t.Errorf("what the zombie did cost the next holder its lease: %v", err)
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
