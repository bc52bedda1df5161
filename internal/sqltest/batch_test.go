package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// batches are what takes several leases, by its name and by that of functions with the
// same arguments: pgxlock_acquire_batch(), and pgxlock_acquire_one() of each, take those
// that are just free by themselves.
var batches = []string{"pgxlock_acquire_each", "take_batch", "take_singly"}

// batchFunctions makes those of batches that are not pgxlock's.
const batchFunctions = `
create or replace function take_batch(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[])
returns table (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint) language plpgsql as $$
begin
  return query select b.tokens[n] is not null, b.tokens[n], coalesce(b.held_by[n], case when b.tokens[n] is not null then p_holders[n] end), coalesce(b.remaining_ms[n], p_ttls[n])
    from pgxlock_acquire_batch(p_names, p_holders, p_ttls, p_metadata, array_fill(0::bigint, array[cardinality(p_names)])) b, generate_subscripts(p_names, 1) n;
end $$;
create or replace function take_singly(p_names text[], p_holders text[], p_ttls bigint[], p_metadata text[])
returns table (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint) language plpgsql as $$
begin
  for i in 1..cardinality(p_names) loop
    return query select b.token is not null, b.token, coalesce(b.held_by, case when b.token is not null then p_holders[i] end), coalesce(b.remaining_ms, p_ttls[i])
      from pgxlock_acquire_one(p_names[i], p_holders[i], p_ttls[i], p_metadata[i], 0) b;
  end loop;
end $$`

// batch is a call that takes several leases for one holder, for a minute, and says
// of each whether it was granted and who has it.
func batch(function, holder string, names ...string) string {
	forEach := func(value string) string { return strings.TrimSuffix(strings.Repeat(value+",", len(names)), ",") }
	return fmt.Sprintf("(select string_agg(concat_ws(' ', b.acquired, b.held_by), ',' order by n) from %s('{%s}', '{%s}', '{%s}', '{%s}') with ordinality as b (acquired, token, held_by, ms, n))",
		function, strings.Join(names, ","), forEach(holder), forEach("60000"), forEach("null"))
}

// What an open transaction does with one of the leases delays none of the others,
// nor the answer of that one; above READ COMMITTED with a snapshot from before
// the lease, too.
func TestBatchNeverWaitsForUncommittedWork(t *testing.T) {
	t.Parallel()
	d := install(t)
	holder, contender := d.sessions()
	for _, c := range [][2]string{{batches[0], levels[0]}, {batches[0], levels[1]}, {batches[0], levels[2]}, {batches[1], readCommitted}, {batches[2], readCommitted}} {
		function, level := c[0], c[1]
		if testing.Short() && (level != readCommitted || function == batches[2]) {
			continue
		}
		for _, w := range openWork {
			contender.begin(level)
			switch w.before {
			case "":
			case "expired":
				d.do("select acquire_lock('k', 'X')")
				d.expire("k")
			default:
				d.do("select " + w.before)
			}
			holder.begin(readCommitted)
			holder.do("select " + w.work)
			got := contender.outcome(batch(function, "B", "a", "k", "z"))
			granted := strings.HasPrefix(got, "t B,f") && strings.HasSuffix(got, ",t B") // all but k
			if !granted && (got != "40001" || level == readCommitted) {
				t.Errorf("%s, %s, %s: got %s, want a and z to be granted and k to be busy", function, level, w.name, got)
			}
			contender.rollback()
			holder.rollback()
			d.do("delete from distributed_locks")
		}
	}
}

// A batch finds no row and is about to take the guards; others' acquires commit
// now, and one of them has come and gone. It has to judge by what is there under
// the guard, and lets the holder that it finds release.
func TestBatchGoesByWhatIsThereUnderTheGuard(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, function := range batches {
		d := installGated(t)
		gate := d.turnstile()
		contender := d.begin(readCommitted)
		try := gate.stop(contender, "guard", batch(function, "B", "k", "l", "m"))
		d.want("acquire_lock('k', 'A') and acquire_lock('l', 'A')", "true")
		d.want("release_lock('l', 'A')", "true")
		gate.open()
		try.want("f A,t B,t B")
		d.want("release_lock('k', 'A')", "true")
		contender.commit()
		contender.done()
		d.want("select string_agg(lock_name || ' ' || holder_id, ',' order by lock_name) from distributed_locks", "l B,m B")
		d.want("acquire_lock('k', 'C')", "true")
	}
}

// Somebody else is just inserting the name, and holds its guard or its pin.
func TestBatchLeavesANameThatIsBeingTaken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, function := range batches {
		for _, space := range []string{"guard", "pin"} {
			other := d.begin(readCommitted)
			other.do("select pg_advisory_xact_lock(pgxlock_key('" + space + "', 'k'))")
			d.want(batch(function, "B", "k", "free"), "f,t B")
			other.done()
			d.want("release_all_locks('B')", "1")
		}
	}
}

// Each entry is answered as a call of try_acquire_lock() would be.
func TestBatchAnswersAsSingleCallsDo(t *testing.T) {
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, function := range batches {
			if function == "pgxlock_acquire_each" || level == readCommitted {
				answersAsSingleCallsDo(d, level, function)
			}
		}
	})
}

func answersAsSingleCallsDo(d *database, level, function string) {
	d.t.Helper()
	d.do("delete from distributed_locks")
	d.want("acquire_lock('held', 'A') and acquire_lock('expired', 'A') and acquire_lock('mine', 'B', 600, '{\"n\": 1}')", "true")
	d.expire("expired")
	mine, expired := d.get("select fencing_token from distributed_locks where lock_name = 'mine'"), d.number("select fencing_token from distributed_locks where lock_name = 'expired'")
	s := d.begin(level)
	s.want(batch(function, "B", "held", "new", "expired", "mine", "new", "again"), "f A,t B,t B,t B,t B,t B")
	s.commit()
	s.done()
	d.want("select count(*) from distributed_locks where holder_id = 'B' and expires_at between clock_timestamp() and clock_timestamp() + interval '1 minute'", "4")
	d.want("select count(distinct fencing_token) from distributed_locks", "5")
	d.want("select fencing_token from distributed_locks where lock_name = 'mine'", mine)
	d.want("select metadata from distributed_locks where lock_name = 'mine'", `{"n": 1}`)
	d.want(fmt.Sprintf("select fencing_token > %d from distributed_locks where lock_name = 'expired'", expired), "true")
	d.want("select count(*) from distributed_locks l, lateral "+function+"(array[l.lock_name::text], '{C}', '{1}', '{null}') b where b.remaining_ms between 20000 and 3600000 and b.fencing_token is null and not b.acquired", "5")
	s = d.begin(level)
	s.do("create temporary table got on commit drop as select * from " + function + "('{t}', '{A}', '{50000}', '{[7]}')")
	s.want("select b.fencing_token = l.fencing_token and b.remaining_ms = 50000 and b.held_by = 'A' and l.metadata = '[7]' from got b, distributed_locks l where l.lock_name = 't'", "true")
	s.done()
	// Who comes twice under different names is two.
	d.want("(select string_agg(concat_ws(' ', b.acquired, b.held_by), ',') from "+function+"('{x,x}', '{A,B}', '{60000,60000}', '{null,null}') b)", "t A,f A")
	// Bad input fails all of the batch, and takes nothing.
	for _, bad := range []string{
		"'{new2,NULL}', '{A,A}', '{1,1}', '{null,null}'", "'{new2,\"\"}', '{A,A}', '{1,1}', '{null,null}'", "'{new2,l}', '{A,*}', '{1,1}', '{null,null}'",
		"'{new2,l}', '{A,A}', '{1,0}', '{null,null}'", "'{new2,l}', '{A,A}', '{1,3110400000001}', '{null,null}'", "'{new2,l}', '{A,A}', '{1,1}', '{null,x}'",
		"'{new2,l}', '{A,A}', '{1,1}', array[null, to_jsonb(repeat('x', 65535))::text]", "'{new2,l}', '{A,NULL}', '{1,1}', '{null,null}'",
	} {
		s := d.begin(level)
		s.want("(select count(*) from "+function+"("+bad+"))", "22023|22P02")
		s.rollback()
	}
	d.want("select count(*) from distributed_locks where lock_name in ('new2', 'l')", "0")
	d.want("(select count(*) from "+function+"('{l}', '{A}', '{3110400000000}', array[to_jsonb(repeat('x', 65534))::text]) where acquired)", "1")
}

// Batches and single calls for the same names, some of them expired, some rolled
// back: at no moment do two believe that they hold one, and tokens grow.
func TestSoakBatchesAndSingleCallsExcludeEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const names, workers = 12, 8
	rounds := pgtest.Soak(t, 150, 6000)
	d := install(t)
	var mu sync.Mutex
	var holds [names]string
	var highest [names]int64
	var granted int
	enter := func(name int, holder string, token int64) {
		mu.Lock()
		defer mu.Unlock()
		granted++
		if holds[name] != "" || token <= highest[name] {
			t.Errorf("lock %d: %s has it with token %d, but %q has not given it back, and there was token %d", name, holder, token, holds[name], highest[name])
		}
		holds[name], highest[name] = holder, token
	}
	leave := func(name int) {
		mu.Lock()
		defer mu.Unlock()
		holds[name] = ""
	}
	var working sync.WaitGroup
	for w := range workers {
		s, random := d.connect(), rand.New(rand.NewPCG(rand.Uint64(), 0))
		me := fmt.Sprint("worker ", w)
		working.Go(func() {
			for range rounds {
				if t.Failed() {
					return
				}
				list := make([]string, 1+random.IntN(names))
				picked := random.Perm(names)[:len(list)]
				for i, name := range picked {
					list[i] = fmt.Sprint(name)
				}
				all := "'{" + strings.Join(list, ",") + "}'::text[]"
				abandon := random.IntN(5) == 0
				s.begin(readCommitted)
				call := fmt.Sprintf("%[3]s(%[1]s, array_fill(%[2]s::text, array[cardinality(%[1]s)]), array_fill(60000::bigint, array[cardinality(%[1]s)]), array_fill(null::text, array[cardinality(%[1]s)])) with ordinality as b (acquired, token, held_by, ms, n)", all, quote(me), batches[random.IntN(len(batches))])
				if w%3 == 0 {
					call = fmt.Sprintf("unnest(%s) with ordinality as w (name, n), lateral (select acquired, fencing_token as token from try_acquire_lock(w.name, %s, '1 minute')) b", all, quote(me))
				}
				tokens := strings.Split(s.get("(select string_agg(coalesce(case when b.acquired then b.token end, 0)::text, ',' order by n) from "+call+")"), ",")
				if abandon {
					s.rollback()
					continue
				}
				s.commit()
				var mine []int
				for i, name := range picked {
					var token int64
					if _, err := fmt.Sscan(tokens[i], &token); err != nil {
						t.Error(err)
						return
					}
					if token != 0 {
						enter(name, me, token)
						mine = append(mine, name)
					}
				}
				for _, number := range mine {
					name := fmt.Sprint(number)
					leave(number)
					if random.IntN(4) == 0 {
						s.do("update distributed_locks set expires_at = clock_timestamp() where lock_name = " + quote(name)) // left to its expiry
					} else {
						// Refused while somebody looks whether it can be taken over.
						got := "55P03"
						for got == "55P03" {
							got = s.outcome("release_lock(" + quote(name) + ", " + quote(me) + ")")
						}
						if got != "true" {
							t.Errorf("release of lock %s: %s", name, got)
						}
					}
				}
			}
		})
	}
	working.Wait()
	if granted < rounds {
		t.Errorf("only %d grants: nothing was tested", granted)
	}
}

// A batch finds no row; before it has the guard somebody takes the lease. That one runs
// out, the next takes it over, which needs no guard, and gives it back. The token of the
// batch must be greater than that one's: it is drawn after the guard was obtained.
func TestBatchThatIsOvertakenByATakeOverGetsTheGreaterToken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	gate := d.turnstile()
	for _, function := range batches[1:] {
		taking := gate.stop(d.connect(), "guard", batch(function, "A", "k", "l"))
		d.want("acquire_lock('k', 'B', 60)", "true")
		d.expire("k")
		d.want("acquire_lock('k', 'C', 60)", "true")
		before := d.number("select fencing_token from distributed_locks where lock_name = 'k'")
		d.want("release_lock('k', 'C')", "true")
		gate.open()
		taking.want("t A,t A")
		if after := d.number("select fencing_token from distributed_locks where lock_name = 'k'"); after <= before {
			t.Errorf("%s: token %d, after %d", function, after, before)
		}
		d.do("delete from distributed_locks")
	}
}

// Not when its transaction began.
func TestLeaseOfABatchBeginsWhenItIsTaken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, function := range batches {
		s := d.begin(readCommitted)
		before := s.get("clock_timestamp()")
		s.want(batch(function, "A", "k"), "t A")
		s.want("select acquired_at >= "+quote(before)+" and expires_at = acquired_at + interval '1 minute' from distributed_locks", "true")
		s.done()
	}
}

func TestBatchOfWhatOthersHaveLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
	for _, function := range batches {
		s := d.begin(readCommitted)
		s.want(batch(function, "A", "k", "l"), "f H,f H")
		s.want("pg_current_xact_id_if_assigned()", "NULL")
		s.want("select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'", "0")
		s.done()
	}
}
