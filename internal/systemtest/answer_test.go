package systemtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// An answerer answers requests in one transaction of its own.
type answerer struct {
	answer func(key, request string, fn func() ([]byte, error), opts ...pgxlock.ClaimTxOption) ([]byte, error)
	claim  func(key string) (bool, error)
	end    func(commit bool)
}

// answerers begin transactions by which requests are answered.
func answerers(t *testing.T, db *pgtest.DB) map[string]func(level pgx.TxIsoLevel) answerer {
	t.Helper()
	return map[string]func(pgx.TxIsoLevel) answerer{
		"pgx": func(level pgx.TxIsoLevel) answerer {
			tx := testkit.Begin(t, db, pgx.TxOptions{IsoLevel: level})
			return answerer{
				func(key, request string, fn func() ([]byte, error), opts ...pgxlock.ClaimTxOption) ([]byte, error) {
					return pgxlock.AnswerTx(t.Context(), tx, key, []byte(request), fn, opts...)
				},
				func(key string) (bool, error) { return pgxlock.ClaimTx(t.Context(), tx, key) },
				func(commit bool) {
					if commit {
						testkit.Commit(t, tx)
					} else {
						testkit.Rollback(t, tx)
					}
				},
			}
		},
		"database/sql": func(level pgx.TxIsoLevel) answerer {
			tx := beginSQLTx(t, db, level)
			if _, err := tx.ExecContext(t.Context(), "set local standard_conforming_strings = off; set local client_encoding = LATIN1"); err != nil {
				t.Fatal(err)
			}
			return answerer{
				func(key, request string, fn func() ([]byte, error), opts ...pgxlock.ClaimTxOption) ([]byte, error) {
					return pgxlock.AnswerSQLTx(t.Context(), tx, key, []byte(request), fn, opts...)
				},
				func(key string) (bool, error) { return pgxlock.ClaimSQLTx(t.Context(), tx, key) },
				func(commit bool) {
					var prepared int // with the key in its text, and so one for each
					if err := tx.QueryRowContext(t.Context(), "select count(*) from pg_prepared_statements where statement ~ 'claim_reques[t]' and statement !~ '[$]1'").Scan(&prepared); err != nil || prepared > 0 {
						t.Errorf("%d statements are prepared: %v", prepared, err)
					}
					end := tx.Rollback
					if commit {
						end = tx.Commit
					}
					if err := end(); err != nil {
						t.Fatal(err)
					}
				},
			}
		},
	}
}

// answers returns a function that answers so, and counts its calls.
func answers(calls *int, answer []byte) func() ([]byte, error) {
	return func() ([]byte, error) {
		*calls++
		return answer, nil
	}
}

// wantAnswer answers a request, which must give that answer after so many calls of fn.
func (a answerer) wantAnswer(t *testing.T, key, request string, want []byte, calls int, opts ...pgxlock.ClaimTxOption) {
	t.Helper()
	n := 0
	got, err := a.answer(key, request, answers(&n, want), opts...)
	if err != nil || !bytes.Equal(got, want) || n != calls {
		t.Errorf("%q %q: %q after %d calls, %v; want %q after %d", key, request, got, n, err, want, calls)
	}
}

// wantRefused answers a request, which must fail with that error without a call of fn.
func (a answerer) wantRefused(t *testing.T, key, request string, want error, opts ...pgxlock.ClaimTxOption) {
	t.Helper()
	n := 0
	got, err := a.answer(key, request, answers(&n, []byte("refused")), opts...)
	if !errors.Is(err, want) || got != nil || n != 0 {
		t.Errorf("%q %q: %q after %d calls, %v; want %v", key, request, got, n, err, want)
	}
	wantClaimRefused(t, err, "answer")
}

// requestsAreAnsweredOnce shares the database of a test of claims.
func requestsAreAnsweredOnce(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db = testkit.Roomy(t, db, 10)
	every := make([]byte, 256) // an answer is bytes, not text
	for i := range every {
		every[i] = byte(i)
	}
	for kind, begin := range answerers(t, db) {
		failed := begin("")
		broken := errors.New("broken")
		if _, err := failed.answer(kind, "a", func() ([]byte, error) { return nil, broken }); err != broken { //nolint:errorlint // unchanged
			t.Errorf("%s: %v, want fn's error", kind, err)
		}
		failed.end(false)

		first, other := begin(""), begin("")
		var events []pgxlock.Event
		observe := pgxlock.Observe(func(_ context.Context, e pgxlock.Event) { events = append(events, e) })
		first.wantAnswer(t, kind, "a", every, 1, pgxlock.Retention(time.Hour), pgxlock.Schema("public"), observe)
		first.wantAnswer(t, kind, "a", every, 0) // in the same transaction
		first.wantAnswer(t, kind+" nothing", "", nil, 1)
		other.wantRefused(t, kind, "a", pgxlock.ErrNotAcquired, pgxlock.NoWait, observe)
		other.wantRefused(t, kind, "b", pgxlock.ErrNotAcquired, pgxlock.MaxWait(20*time.Millisecond))
		if claimed, err := other.claim(kind + " claimed"); err != nil || !claimed {
			t.Errorf("%s: %t, %v", kind, claimed, err)
		}
		first.end(true)
		other.end(true)

		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			late := begin(level)
			late.wantAnswer(t, kind, "a", every, 0, pgxlock.NoWait, observe)
			late.wantAnswer(t, kind+" nothing", "", nil, 0, testkit.LongWait)
			late.wantRefused(t, kind, "b", pgxlock.ErrOtherRequest, observe)
			late.wantRefused(t, kind+" claimed", "a", pgxlock.ErrOtherRequest)
			if claimed, err := late.claim(kind); err != nil || claimed {
				t.Errorf("%s: %t, %v, want a claim of ClaimTx to find it done", kind, claimed, err)
			}
			late.wantAnswer(t, kind+string(level), "c", []byte("it goes on"), 1)
			late.end(true)
		}
		for i, want := range []string{"ok", "busy", "skipped", "skipped"} {
			if e := events[i]; e.Op != pgxlock.EventClaim || e.Key != kind || e.Result() != want || e.Granted != (want == "ok") {
				t.Errorf("%s: event %d is %v, want %s", kind, i, e, want)
			}
		}
		if !testkit.Query[bool](t, db, "select expires_at - claimed_at = interval '1 hour' from pgxlock_claims where claim_key = $1", kind) {
			t.Errorf("%s: the retention is not an hour", kind)
		}

		large := begin("")
		n := 0
		_, err := large.answer(kind+" large", "", answers(&n, make([]byte, 1<<20+1)))
		wantClaimRefused(t, err, "answer", "the answer has 1048577 bytes", "1048576 are allowed")
		large.wantAnswer(t, kind+" large", "", bytes.Repeat(every, 1<<12), 1)
		_, err = large.answer(kind+" without fn", "", nil)
		wantClaimRefused(t, err, "answer", "fn is nil")
		large.end(true)
		begin("").wantAnswer(t, kind+" large", "", bytes.Repeat(every, 1<<12), 0)
	}
}

// The answer is purged, or its retention is over, between the statement that finds it and the one that
// reads it: then the transaction is the first one.
func TestAnswerThatEndsWhileItIsReadIsMadeAnew(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	first := testkit.Begin(t, db, pgx.TxOptions{})
	n := 0
	if _, err := pgxlock.AnswerTx(t.Context(), first, "k", nil, answers(&n, []byte("old"))); err != nil {
		t.Fatal(err)
	}
	testkit.Commit(t, first)
	var purge sync.Once
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = testkit.OnStatement("SELECT c.answer", func() {
			purge.Do(func() { db.Exec(t, "delete from pgxlock_claims") })
		})
	})
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgxlock.AnswerTx(t.Context(), tx, "k", nil, answers(&n, []byte("new")))
	if err != nil || string(got) != "new" || n != 2 {
		t.Errorf("%q after %d calls, %v; want the new answer", got, n, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Clients repeat requests at the same time, at all levels; work fails, and sessions are killed in the
// midst of it. Each request is done once, and all its callers receive what was done.
func TestSoakRequestsAreAnsweredOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const workers = 6
	db := testkit.Roomy(t, testkit.Migrated(t), workers+2)
	keys := pgtest.Soak(t, 60, 2000)
	db.Exec(t, "create table done (key text, worker int)")
	var killed, conflicts, replayed atomic.Int32
	for key := range keys {
		name := fmt.Sprint("post:", key)
		var working sync.WaitGroup
		answered := make([]string, workers)
		for worker := range workers {
			dice := rand.New(rand.NewPCG(uint64(key), uint64(worker)))
			working.Go(func() {
				for answered[worker] == "" && !t.Failed() {
					answer, first, err := answerAndWrite(t.Context(), dice, db, name, worker)
					switch pgErr, ok := errors.AsType[*pgconn.PgError](err); {
					case err == nil:
						if answered[worker] = answer; !first {
							replayed.Add(1)
						}
					case errors.Is(err, errKilled):
						killed.Add(1)
					case errors.Is(err, pgxlock.ErrNotAcquired), ok && pgErr.Code == "40001":
						conflicts.Add(1)
					default:
						t.Errorf("worker %d, %q: %v", worker, name, err)
					}
				}
			})
		}
		working.Wait()
		if t.Failed() {
			return
		}
		done := testkit.Query[string](t, db, "select string_agg(worker::text, ' ') from done where key = $1", name)
		for worker, answer := range answered {
			if answer != "by "+done {
				t.Errorf("%q: worker %d received %q, and it was done by %s", name, worker, answer, done)
			}
		}
	}
	if killed.Load() == 0 || conflicts.Load() == 0 || replayed.Load() == 0 {
		t.Errorf("%d killed, %d conflicts, %d replayed: nothing was tested", killed.Load(), conflicts.Load(), replayed.Load())
	}
}

var errKilled = errors.New("killed before the commit")

// answerAndWrite answers a request in a transaction of its own, of which some end before their commit.
func answerAndWrite(ctx context.Context, dice *rand.Rand, db *pgtest.DB, key string, worker int) (answer string, first bool, err error) {
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: []pgx.TxIsoLevel{"", "", pgx.RepeatableRead, pgx.Serializable}[dice.IntN(4)]})
	if err != nil {
		return "", false, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	opts := [][]pgxlock.ClaimTxOption{nil, {pgxlock.NoWait}, {pgxlock.MaxWait(time.Millisecond)}, {testkit.LongWait}}[dice.IntN(4)]
	got, err := pgxlock.AnswerTx(ctx, tx, key, []byte(strings.ToUpper(key)), func() ([]byte, error) {
		first = true
		if _, err := tx.Exec(ctx, "insert into done values ($1, $2)", key, worker); err != nil {
			return nil, err
		}
		if dice.IntN(3) == 0 {
			_ = tx.Conn().Close(ctx)
			return nil, errKilled
		}
		return fmt.Append(nil, "by ", worker), nil
	}, opts...)
	if err != nil {
		return "", false, err
	}
	if first && dice.IntN(4) == 0 {
		_ = tx.Conn().Close(ctx)
		return "", false, errKilled
	}
	return string(got), first, tx.Commit(ctx)
}
