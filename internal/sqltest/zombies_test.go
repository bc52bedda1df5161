package sqltest_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Workers share one lease with a ttl of milliseconds, and write under fences in
// transactions that are open for longer than that, at every isolation level,
// some rolled back, some begun before the acquire. Others renew, release and
// reap meanwhile. A session that commits must still be the holder at that moment, and
// no write may follow one with a higher token.
func TestSoakZombiesDoNotCommit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	workers, rounds := pgtest.Soak(t, 8, 16), pgtest.Soak(t, 200, 10_000)
	d := install(t)
	d.do(`
		create table resource (token bigint not null);
		insert into resource values (0);
		create function still_held() returns trigger language plpgsql as $$
		begin
		  if current_setting('transaction_isolation') = 'read committed' -- else the snapshot shows the past
		     and new.token is distinct from (select fencing_token from distributed_locks where lock_name = 'k') then
		    raise 'token % commits after a take-over', new.token using errcode = 'ZZ001';
		  end if;
		  return null;
		end $$;
		create constraint trigger still_held after update on resource
		  deferrable initially deferred for each row execute function still_held()`)

	var passed atomic.Int64
	var wg sync.WaitGroup
	for i := range workers {
		w := &worker{session: d.connect(), other: d.connect(), holder: fmt.Sprintf("w%d", i), random: rand.New(rand.NewPCG(rand.Uint64(), 0))}
		wg.Go(func() {
			for passed.Load() < int64(rounds) && !t.Failed() {
				if w.round() {
					passed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	d.want("select max(token) > 0 from resource", "true")
}

// worker is one of those who share the lease.
type worker struct {
	*session
	other  *session // for what happens beside the worker's transaction
	holder string
	random *rand.Rand
}

// chance is true once in n times.
func (w *worker) chance(n int) bool { return w.random.IntN(n) == 0 }

// may runs a statement that may fail as documented.
func (w *worker) may(s *session, sql string) bool {
	err := s.run(sql)
	var pgErr *pgconn.PgError
	if err == nil {
		return true
	}
	if !errors.As(err, &pgErr) || !oneOf(pgErr.Code, "LK001|LK002|40001|55P03") {
		w.t.Errorf("%s: %v", sql, err)
	}
	return false
}

// round is one attempt to write under the lease. It tells whether it was fenced
// to the end.
func (w *worker) round() bool {
	me := quote(w.holder)
	level := levels[w.random.IntN(len(levels))]
	early := w.chance(4) // takes its snapshot before it has the lease
	if early {
		w.do("begin isolation level " + level + "; select 1")
	}
	got := w.other.outcome(fmt.Sprintf("(try_acquire_lock('k', %s, '%d ms')).fencing_token", me, 1+w.random.IntN(15)))
	token, err := strconv.ParseInt(got, 10, 64)
	if err != nil {
		if got != "NULL" {
			w.t.Errorf("try_acquire_lock: %s", got)
		}
		w.may(w.session, "rollback")
		if w.chance(10) {
			w.may(w.other, "select reap_expired_locks('0 s')")
		}
		return false
	}
	if !early {
		w.do("begin isolation level " + level)
	}
	w.pause()
	if !w.may(w.session, fmt.Sprintf("select assert_lock_held('k', %s, %d, true)", me, token)) {
		w.may(w.session, "rollback")
		return false
	}
	if w.chance(4) {
		w.may(w.other, fmt.Sprintf("select renew_lock('k', %s, %d, '5 ms')", me, token))
	}
	w.pause()
	ok := w.may(w.session, fmt.Sprintf(`do $$ begin
		  update resource set token = %d where token <= %[1]d;
		  if not found then raise 'token %[1]d is written after a higher one' using errcode = 'ZZ002'; end if;
		end $$`, token))
	end := "commit"
	if !ok || w.chance(5) {
		end = "rollback"
	}
	ok = w.may(w.session, end) && ok
	if w.chance(2) {
		w.may(w.other, fmt.Sprintf("select release_lock_fenced('k', %s, %d)", me, token))
	}
	return ok
}

// pause lets the lease expire now and then, by the server's clock.
func (w *worker) pause() {
	if w.chance(2) {
		w.do(fmt.Sprintf("select pg_sleep(%d / 1000.0)", w.random.IntN(12)))
	}
}
