// Releases of leases in batches: the outcome of each, and whether anybody waits for it.

package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// givesBack is the call that gives leases of one holder back: a letter for each outcome,
// in upper case where somebody waits.
func givesBack(holder string, names ...string) string {
	if len(names) == 1 {
		return fmt.Sprintf("select pgxlock_release_one(%s, %s, null)", quote(names[0]), quote(holder))
	}
	return fmt.Sprintf("select pgxlock_release_batch('{%[1]s}', array_fill(%[2]s::text, '{%[3]d}'), array_fill(null::bigint, '{%[3]d}'))",
		strings.Join(names, ","), quote(holder), len(names))
}

// releases are what is released with k, if anything. rest is how the others' releases end, if the
// holder has all of them.
var releases = []struct {
	names []string
	rest  string
	asks  func(name, holder, ticket string) string // how who waits tries
}{{[]string{"k"}, "", asksForOne}, {[]string{"k", "l"}, "r", asks}}

// stops are places at which sessions are made to wait, in the order of their numbers.
type stops struct {
	*session
	d *database
}

// Where a session waits that has set sqltest.stop, each by an advisory lock of this number.
const (
	beforePins = iota + 1
	whileDeleting
	whenDeleted
	afterTheCall // an open transaction waits by itself
	afterCommit
	whenRefused // of who takes
)

func (d *database) stops() stops {
	d.t.Helper()
	d.do(`create function stop_at(p_place bigint) returns void language plpgsql as $$
		begin
		  if current_setting('sqltest.stop', true) = 'on' then
		    perform pg_advisory_lock(p_place);
		    perform pg_advisory_unlock(p_place);
		  end if;
		end $$;
		create function stop_row() returns trigger language plpgsql as $$ begin perform public.stop_at(tg_argv[0]::bigint); return old; end $$;
		create trigger stop_before before delete on distributed_locks for each row execute function stop_row(2);
		create trigger stop_after after delete on distributed_locks for each row execute function stop_row(3);
		alter function pgxlock_key(text, text) rename to pgxlock_key_itself;
		create function pgxlock_key(p_space text, p_name text) returns bigint language plpgsql as $$
		begin
		  if p_space = 'pin' then perform public.stop_at(1); end if;
		  return pgxlock_key_itself(p_space, p_name);
		end $$;
		alter function pgxlock_settle_tickets(text[], bigint[], boolean[], bigint[]) rename to settle_tickets_itself;
		create function pgxlock_settle_tickets(text[], bigint[], boolean[], bigint[]) returns void language plpgsql as $$
		begin
		  perform public.stop_at(6);
		  perform settle_tickets_itself($1, $2, $3, $4);
		end $$`)
	return stops{d.connect(), d}
}

// closeAll has the session stop everywhere.
func (s stops) closeAll(who *session) {
	s.t.Helper()
	s.do("select pg_advisory_unlock_all(); select pg_advisory_lock(i) from generate_series(1, 6) i")
	who.do("set sqltest.stop = on")
}

// open lets who wait there go on, and returns when they wait at the next place.
func (s stops) open(place int) {
	s.t.Helper()
	s.want(fmt.Sprintf("pg_advisory_unlock(%d)", place), "true")
}

func (s stops) arrives(who *session, place int) {
	s.t.Helper()
	await(s.t, s.d, fmt.Sprintf("exists (select from pg_locks where pid = %d and locktype = 'advisory' and not granted and objid = %d)", who.pid, place))
}

// asks is take, and says of who is refused whether it is told to ask again soon.
func asks(name, holder, ticket string) string {
	return fmt.Sprintf("select concat_ws(' ', tokens[1] is not null, coalesce(held_by[1], case when tokens[1] is not null then %[2]s end), coalesce(remaining_ms[1], 60000) < 20000) from pgxlock_acquire_batch(array[%[1]s], array[%[2]s], '{60000}', '{NULL}', array[%[3]s]::bigint[])",
		quote(name), quote(holder), ticket)
}

// asksForOne is the same without a batch.
func asksForOne(name, holder, ticket string) string {
	return fmt.Sprintf("select concat_ws(' ', token is not null, coalesce(held_by, case when token is not null then %[2]s end), coalesce(remaining_ms, 60000) < 20000) from pgxlock_acquire_one(%[1]s, %[2]s, 60000, NULL, %[3]s)",
		quote(name), quote(holder), ticket)
}

// The answers to a refused caller: it is woken, or asks again without that.
const (
	sleeps   = "f H f"
	asksSoon = "f H t"
)

// Wherever the one who gives back is when somebody publishes a ticket, and wherever it
// is when that asks: it knows that somebody waits, or who waits has the lease, or asks
// again.
func TestReleaseIsNotMissedWhereverATicketComesInBetween(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	s := d.stops()
	for _, release := range releases {
		for published := beforePins; published <= afterCommit; published++ {
			for asked := published; asked <= afterCommit; asked++ {
				d.want("acquire_lock('k', 'H', 60) and acquire_lock('l', 'H', 60)", "true")
				p, r := d.process(), d.connect()
				s.closeAll(r)
				r.do("begin")
				var ticket, answer string
				var giving *call
				for place := beforePins; place <= afterCommit; place++ {
					switch place {
					case beforePins:
						giving = r.start(givesBack("H", release.names...))
						s.arrives(r, place)
					case whileDeleting, whenDeleted:
						s.open(place - 1)
						s.arrives(r, place)
					case afterTheCall:
						s.open(place - 1)
						giving.outcome()
					case afterCommit:
						r.commit()
					}
					if place == published {
						ticket = p.queue(0, "k")
					}
					if place == asked {
						answer = p.get(release.asks("k", "P", ticket))
					}
				}
				wanted := giving.outcome() == "R"+release.rest
				if told := answer == "t P f" || answer == asksSoon; !wanted && !told {
					t.Errorf("%s, published at %d, asked at %d: it says %q, and who waits heard %q", release.names, published, asked, giving.outcome(), answer)
				}
				if answer == asksSoon {
					p.want(release.asks("k", "P", ticket), "t P f")
				}
				d.do("delete from distributed_locks; delete from pgxlock_waiters")
			}
		}
	}
}

// The release looked for tickets before there was this one, and commits when who waits
// has read that the lease is held.
func TestTryRefusedByALeaseThatGoesMeanwhileIsRepeated(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	s := d.stops()
	for lease, asks := range map[string]func(name, holder, ticket string) string{"k": asks, "l": asksForOne} {
		d.want("acquire_lock("+quote(lease)+", 'H', 60)", "true")
		p, r := d.process(), d.connect()
		r.do("begin")
		r.want(givesBack("H", lease), "r")
		ticket := p.queue(0, lease)
		s.closeAll(p.session)
		for place := beforePins; place < whenRefused; place++ {
			s.open(place)
		}
		asking := p.start(asks(lease, "P", ticket))
		s.arrives(p.session, whenRefused)
		r.commit()
		s.open(whenRefused)
		asking.want(asksSoon)
		p.want(asks(lease, "P", ticket), "t P f")
	}
}

// Others than who deletes leave their number in a row, too.
func TestOnlyARowThatIsJustBeingChangedIsAskedForSoon(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	p, other := d.process(), d.connect()
	d.want("acquire_lock('k', 'H', 60)", "true")
	ticket := p.queue(0, "k")
	p.want(asks("k", "P", ticket), sleeps)
	p.want(asksForOne("k", "P", ticket), sleeps)
	for _, change := range []string{
		"select pgxlock_renew_batch('{k}', '{H}', array_agg(fencing_token), '{60000}') from distributed_locks", // which locks the row first
		"select from distributed_locks for key share",
		"delete from distributed_locks",
		givesBack("H", "k"),
	} {
		for _, end := range []string{"rollback", "commit"} {
			if end == "commit" && !strings.HasPrefix(change, "select pgxlock_renew") {
				continue
			}
			other.do("begin")
			other.do(change)
			p.want(asks("k", "P", ticket), asksSoon)
			p.want(asksForOne("k", "P", ticket), asksSoon)
			other.do(end)
			p.want(asks("k", "P", ticket), sleeps)
			p.want(asksForOne("k", "P", ticket), sleeps)
		}
	}

	// Who waits longer asks less often; who has no ticket, and whose way is barred by
	// others, is woken, if at all.
	other.do("begin; delete from distributed_locks")
	d.do("update pgxlock_waiters set since = clock_timestamp() - interval '16 s'")
	d.want("(select remaining_ms[1] between 8000 and 30000 from pgxlock_acquire_batch('{k}', '{P}', '{1}', '{null}', '{"+ticket+"}'))", "true")
	d.do("update pgxlock_waiters set since = clock_timestamp() - interval '1 h'")
	d.want("(select remaining_ms[1] between 20000 and 60000 from pgxlock_acquire_batch('{k}', '{P}', '{1}', '{null}', '{"+ticket+"}'))", "true")
	d.want(asks("k", "P", "NULL"), sleeps)
	behind := d.process()
	queued := behind.queue(0, "k")
	behind.want(asks("k", "Q", queued), sleeps)
	behind.want(asksForOne("k", "Q", queued), sleeps)
	other.rollback()
}

func TestWhetherARowIsBeingChangedIsToldByItsNumber(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a := d.begin(readCommitted)
	number := a.number("pg_current_xact_id()::xid")
	const many = 10_000_000 // others on this server draw numbers meanwhile, too
	for _, c := range []struct {
		xid  int64
		want string
	}{{0, "false"}, {1, "false"}, {2, "false"}, {3, "false"}, {number, "true"}, {number + many, "true"}, {1<<32 - 1, "false"}, {number + 1<<31 + many, "false"}} { // the last two are of an age before
		d.want(fmt.Sprintf("pgxlock_change_pending('%d')", c.xid), c.want)
	}
	a.commit()
	d.want(fmt.Sprintf("pgxlock_change_pending('%d')", number), "false")
}

func TestReleaseReturnsEachOutcomeAndWhetherOthersWait(t *testing.T) {
	t.Parallel()
	d := install(t)
	p := d.process()
	d.want("(select bool_and(acquire_lock(n, 'H', 60)) from unnest('{live,late,fenced,locked,other}'::text[]) n) and acquire_lock('mine', 'I', 60)", "true")
	d.expire("late")
	for _, name := range []string{"live", "gone", "locked"} {
		p.queue(0, name)
	}
	p.queue(1, "1") // of another kind
	fence, locker := d.begin(readCommitted), d.begin(readCommitted)
	fence.do("select assert_lock_held('fenced', 'H', fencing_token) from distributed_locks where lock_name = 'fenced'")
	locker.do("select from distributed_locks where lock_name = 'locked' for update")
	alone := map[string]string{"gone": "G", "fenced": "s", "1": "g", "locked": "S", "mine": "g"}
	for name, want := range alone {
		d.want(givesBack("H", name), want)
	}
	d.want(givesBack("H", "other", "live", "gone", "late", "fenced", "1", "locked", "mine", "live"),
		"rRGesgSgR") // who comes twice is told twice
	d.want("select string_agg(lock_name, ' ' order by lock_name) from distributed_locks", "fenced locked mine")
	fence.commit()
	locker.commit()
	d.want("pgxlock_release_batch('{fenced,locked,null,mine}', '{H,H,H,null}', array[1, (select fencing_token from distributed_locks where lock_name = 'locked'), 1, null])",
		"gRgg")
	d.want("pgxlock_release_batch('{}', '{}', '{}')", "")
	d.want("acquire_lock('two', 'H', 60)", "true")
	d.want("pgxlock_release_batch('{two,two,two}', '{I,H,H}', '{null,null,1}')", "grg") // the others' is not theirs
	d.do("insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, fencing_token) values ('r', '*maintenance', now(), 'infinity', 7)")
	d.want("pgxlock_release_one('r', '*maintenance', 7) || pgxlock_release_batch('{r,s}', '{*maintenance,H}', '{7,7}')", "ggg")
	d.want("acquire_lock('late', 'H') and acquire_lock('later', 'H')", "true")
	d.expire("late")
	d.expire("later")
	d.want(givesBack("H", "late", "later"), "ee")
	d.want("acquire_lock('late', 'H')", "true")
	d.expire("late")
	d.want(givesBack("H", "late"), "e")
	d.want("(select count(*) from distributed_locks where lock_name in ('late', 'later'))", "0")
	d.want("pgxlock_release_one(null, 'A', 1) || pgxlock_release_one('mine', null, null)", "gg")
	for _, bad := range []string{"'{a}', '{A}', '{}'", "'{a}', '{A,B}', '{1}'", "null, null, null", "'{a}', null, '{1}'"} {
		d.want("pgxlock_release_batch("+bad+")", "22023")
	}
}

// A snapshot that is older than the call does not show who came since.
func TestReleaseInAnOldSnapshotSaysThatOthersMayWait(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("acquire_lock('k', 'H', 60)", "true")
	for _, level := range levels[1:] {
		s := d.begin(level)
		s.want(givesBack("H", "k", "gone"), "RG")
		s.do("rollback and chain")
		s.want(givesBack("H", "k"), "R")
		s.done()
	}
	d.want(givesBack("H", "k", "gone"), "rg")
}

// Between the look and the pin somebody may take over, under another token.
func TestReleaseLeavesALeaseThatWasTakenOver(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installGated(t)
	stile := d.turnstile()
	for _, release := range []string{"select pgxlock_release_one('k', 'H', %d)", "select pgxlock_release_batch('{k}', '{H}', '{%d}')"} {
		token := d.token("k", "H")
		giving := stile.stop(d.connect(), "pin", fmt.Sprintf(release, token))
		d.want("release_lock('k', 'H') and acquire_lock('k', 'H', 60)", "true")
		stile.open()
		giving.want("g")
		d.want(fmt.Sprintf("(select fencing_token > %d from distributed_locks where lock_name = 'k' and holder_id = 'H')", token), "true")
		d.do("delete from distributed_locks")
	}
}
