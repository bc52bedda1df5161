// Fences of advisory locks: the calls that they delay, the locks that they see, and the
// calls that they never wait for.

package sqltest_test

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The levels at which a fence finds nothing, and what it says.
func missing(level string) string {
	if level == readCommitted {
		return "LK001"
	}
	return "LK002"
}

// Whatever ends the session or the hold: who comes next is refused until the
// fenced transaction has ended.
func TestFenceHoldsUpTheNextHolderUntilItsTransactionEnds(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, level := range tried() {
		for _, shared := range []op{0, 1} {
			for name, leave := range map[string]func(h *holder){
				"it ends":          func(h *holder) { h.end() },
				"it unlocks":       func(h *holder) { h.must(unlock+shared, 1, "1") },
				"the lock is lost": func(h *holder) { h.do("select pg_advisory_unlock(1), pg_advisory_unlock_shared(1)") }, // behind our back
				"it unlocks, and tries again": func(h *holder) {
					h.must(unlock+shared, 1, "1")
					h.must(lock, 1, refused)
					h.must(lockShared, 1, refused)
				},
			} {
				h, next := d.holder(), d.holder()
				token, _ := strconv.ParseInt(h.try(lock+shared, 1), 10, 64)
				writer := d.begin(level)
				for range 2 {
					writer.want(h.fence(1, token), fmt.Sprint(token))
				}
				next.must(lock, 1, refused)
				leave(h)
				next.must(lock, 1, refused)
				if shared == 0 {
					next.must(lockShared, 1, refused)
				} else {
					next.share(1) // readers never mind
					next.must(unlockShared, 1, "1")
				}
				writer.commit()
				got := next.lock(1)
				if got <= token {
					t.Errorf("%s, %s: token %d after %d", level, name, got, token)
				}
				d.want(h.fence(1, token), "LK001")
				next.must(unlock, 1, "1")
				d.want(rows, "0")
			}
		}
	}
}

// Of several readers each one holds up the writer by its own fences only.
func TestWriterWaitsForTheFencesOfAllReaders(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b, writer := d.holder(), d.holder(), d.holder()
	token := a.share(1)
	b.share(1)
	fenced := d.begin(readCommitted)
	fenced.want(a.fence(1, token), fmt.Sprint(token))
	b.must(unlockShared, 1, "1")
	d.want(fmt.Sprintf("select string_agg(session::text, ',') from pgxlock_advisory_locks where session <> %d", a.number), "NULL")
	a.must(unlockShared, 1, "1")
	writer.must(lock, 1, refused)
	b.share(1)
	fenced.commit()
	writer.must(lock, 1, refused)
	b.must(unlockShared, 1, "1")
	writer.lock(1)
	d.want(rows, "1") // what the readers left went with it
}

func TestFenceOfASessionLockSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, level := range tried() {
		h, next := d.holder(), d.holder()
		token := h.lock(1)
		two, _ := strconv.ParseInt(h.try(lock+ofTwoInts, 1<<32|2), 10, 64)
		s := d.begin(level)
		s.want(h.fence(1, token), fmt.Sprint(token))
		s.want(fmt.Sprintf("assert_advisory_lock_held(2, %d, %d, %d)", int64(1<<32|2), h.number, two), fmt.Sprint(two))
		for expression, want := range map[string]string{
			h.fence(1, token+1):                        "LK001",
			h.fence(1, 0):                              "LK001",
			h.fence(2, token):                          missing(level),
			next.fence(1, token):                       missing(level),
			next.fence(1, 0):                           missing(level),
			h.fence(1<<32|2, two):                      missing(level),
			"assert_advisory_lock_held(1, 1, 1, null)": "22023",
			"assert_advisory_lock_held(1, 1, null, 1)": "22023",
			"assert_advisory_lock_held(1, null, 1, 1)": "22023",
			"assert_advisory_lock_held(null, 1, 1, 1)": "22023",
			fmt.Sprintf("assert_advisory_lock_held(2, 1, %d, %d)", h.number, token): missing(level),
		} {
			s.do("savepoint s")
			s.want(expression, want)
			s.do("rollback to s")
		}
		s.rollback()
		s.do("begin isolation level " + level + " read only")
		s.want(h.fence(1, token), "25006")
		s.rollback()
		h.want(h.fence(1, token), "LK001") // the holder's own connection cannot tell whether it is there

		// A dead session: free for all, and nobody has taken it.
		h.end()
		s.begin(level)
		s.want(h.fence(1, token), "LK001")
		if held := d.locks(s); held != "NULL" {
			t.Errorf("%s: a failed fence keeps %s", level, held)
		}
		s.rollback()
		next.lock(1)
		next.end()
		d.want("pgxlock_reap_advisory()", "2")
	}
}

// An old snapshot is compared with the present.
func TestFenceAboveReadCommittedSeesThePresent(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, level := range levels[1:] {
		for name, take := range map[string]func(h, next *holder){
			"ended, taken":    func(h, next *holder) { h.end(); next.lock(1) },
			"unlocked, taken": func(h, next *holder) { h.must(unlock, 1, "1"); next.lock(1) },
			"taken again":     func(h, _ *holder) { h.must(unlock, 1, "1"); h.lock(1) },
			"unlocked":        func(h, _ *holder) { h.must(unlock, 1, "1") },
			"reaped":          func(h, _ *holder) { h.end(); d.want("pgxlock_reap_advisory()", "1") },
		} {
			h, next := d.holder(), d.holder()
			token := h.lock(1)
			s := d.begin(level)
			late := d.begin(level)
			take(h, next)
			if got := s.outcome(h.fence(1, token)); got != "40001" {
				t.Errorf("%s, %s: %s", level, name, got)
			}
			s.rollback()
			next.answers(entry{unlock, 1}, entry{lock, 2})
			late.want(next.fence(2, 1), "LK002")
			late.rollback()
			next.end()
			if name == "taken again" {
				h.end()
			}
			d.do("select pgxlock_reap_advisory()")
			d.want(rows, "0")
		}
	}
}

// Open transactions of all who take, give back, reap or lock rows.
func TestFenceOfASessionLockNeverWaits(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, level := range levels {
		for name, c := range map[string]struct {
			begin func(h, next *holder) (open *session)
			want  string
			ends  bool
		}{
			"unlocking": {func(h, _ *holder) *session {
				h.do("begin")
				h.must(unlock, 1, "1")
				return h.session
			}, "LK001", false},
			"taking over": {func(h, next *holder) *session {
				h.end()
				next.do("begin")
				next.lock(1)
				return next.session
			}, "LK001", true},
			"reaping": {func(h, next *holder) *session {
				h.end()
				next.do("begin")
				next.want("pgxlock_reap_advisory()", "1")
				return next.session
			}, "LK001", true},
			"locked by hand": {func(_, next *holder) *session {
				next.do("begin; select from pgxlock_advisory_locks for update")
				return next.session
			}, "LK001|55P03", false},
			"changed, and locked by hand": {func(_, next *holder) *session {
				next.do("update pgxlock_advisory_locks set token = token")
				next.do("begin; select from pgxlock_advisory_locks for update")
				return next.session
			}, "LK001|55P03", false},
			"marked": {func(h, _ *holder) *session {
				other := d.begin(readCommitted)
				other.do("select pg_advisory_xact_lock_shared(pgxlock_advisory_pin(1, 1, " + fmt.Sprint(h.number) + "))")
				h.do("begin")
				h.must(unlock, 1, "1")
				other.rollback()
				return h.session
			}, "token", false},
		} {
			h, next := d.holder(), d.holder()
			token := h.lock(1)
			s := d.begin(level)
			open := c.begin(h, next)
			want := c.want
			if want == "token" { // not committed, so it is as before
				want = fmt.Sprint(token)
			}
			if level == readCommitted && (name == "locked by hand" || name == "changed, and locked by hand") {
				want = fmt.Sprint(token)
			}
			if got := s.outcome(h.fence(1, token)); !oneOf(got, want) {
				t.Errorf("%s, %s: got %s, want %s", level, name, got, want)
			}
			s.rollback()
			s.want("current_setting('lock_timeout')", "0")
			open.rollback()
			if !c.ends {
				h.end()
			}
			next.end()
			d.do("select pgxlock_reap_advisory()")
			d.want(rows, "0")
		}
	}
}

// What a savepoint protected ends with it; and who catches the loss keeps nothing.
func TestFenceOfASessionLockEndsWithItsSavepoint(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	h, next := d.holder(), d.holder()
	token := h.lock(1)
	s := d.begin(readCommitted)
	s.do("savepoint s")
	s.want(h.fence(1, token), fmt.Sprint(token))
	s.do("rollback to s")
	h.end()
	s.do("do $$ begin perform " + h.fence(1, token) + "; raise 'it passed'; exception when sqlstate 'LK001' then null; end $$")
	if held := d.locks(s); held != "NULL" {
		t.Errorf("it keeps %s", held)
	}
	next.lock(1)
	s.rollback()
}

// Whatever comes between the pin and the look at the row is seen: in one statement
// it would not be.
func TestFenceSeesWhoTakesASessionLockJustBeforeThePin(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("alter function pgxlock_advisory_pin(integer, bigint, bigint) rename to pgxlock_advisory_pin_itself")
	d.do(`create function pgxlock_advisory_pin(p_space integer, p_id bigint, p_session bigint) returns bigint language plpgsql as $$
		begin
		  if current_setting('sqltest.stop', true) = 'pin' then
		    perform pg_advisory_lock(-1);
		    perform pg_advisory_unlock(-1);
		  end if;
		  return pgxlock_advisory_pin_itself(p_space, p_id, p_session);
		end $$`)
	gate := d.connect()
	for _, level := range levels {
		for name, take := range map[string]func(h, next *holder){
			"ended, taken": func(h, next *holder) { h.end(); next.lock(1) },
			"taken again":  func(h, _ *holder) { h.must(unlock, 1, "1"); h.lock(1) },
		} {
			h, next := d.holder(), d.holder()
			token := h.lock(1)
			gate.do("select pg_advisory_lock(-1)")
			s := d.begin(level)
			s.do("set sqltest.stop = 'pin'")
			c := s.start(h.fence(1, token))
			c.waitsFor(gate)
			take(h, next)
			gate.do("select pg_advisory_unlock(-1)")
			if got := c.outcome(); !oneOf(got, "LK001|40001") {
				t.Errorf("%s, %s: %s", level, name, got)
			}
			s.rollback()
			next.end()
			d.do(fmt.Sprintf("select pg_terminate_backend(%d)", h.pid))
			await(t, d, fmt.Sprintf("pgxlock_reap_advisory() >= 0 and (%s) = 0", rows))
		}
	}
}
