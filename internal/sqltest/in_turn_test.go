package sqltest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// inTurn is the call by which a SQL caller waits in turn: true, or false and its ticket.
func inTurn(name, holder, ticket string) string {
	return fmt.Sprintf("(select concat_ws(' ', acquired, ticket) from acquire_in_turn(%s, %s, 3600, %s))", quote(name), quote(holder), ticket)
}

// shareInTurn is inTurn for a share.
func shareInTurn(name, holder, ticket string) string {
	return strings.Replace(inTurn(name, holder, ticket), "acquire_in_turn", "acquire_shared_in_turn", 1)
}

// permitsInTurn is inTurn for so many of n permits: true and their names, or false and the ticket.
func permitsInTurn(name, holder string, n, wanted int, ticket string) string {
	return fmt.Sprintf("(select concat_ws(' ', acquired, array_to_string(permits, ','), ticket) from acquire_permits_in_turn(%s, %s, %d, %d, 3600, %s))", quote(name), quote(holder), n, wanted, ticket)
}

// joins lets a SQL caller join the queue, and returns its ticket.
func (s *session) joins(name, holder string) (ticket string) {
	s.t.Helper()
	return s.joinsBy(inTurn(name, holder, "null"))
}

// joinsBy is joins by that call.
func (s *session) joinsBy(call string) (ticket string) {
	s.t.Helper()
	ticket, joined := strings.CutPrefix(s.get(call), "f ")
	if !joined {
		s.t.Fatalf("granted at once: %s", call)
	}
	return ticket
}

// refused wants that a SQL caller keeps its ticket and does not have the lease.
func (s *session) refused(name, holder, ticket string) {
	s.t.Helper()
	s.want(inTurn(name, holder, ticket), "f "+ticket)
}

// woken wants that a ticket was woken and has not tried since, or not.
func (d *database) woken(ticket string, want bool) {
	d.t.Helper()
	d.want("select woken is not null from pgxlock_waiters where ticket = "+ticket, fmt.Sprint(want))
}

// linger lets the tickets of SQL callers last for an hour instead of 3 seconds, however slow this
// machine is. They are refreshed when half of that is over.
func (d *database) linger() {
	d.t.Helper()
	d.want("acquire_lock('k', 'first')", "true")
	lasts := func(want string) {
		d.t.Helper()
		d.want("select live_until - since from pgxlock_waiters where ticket = "+d.joins("k", "A"), want)
		d.do("delete from pgxlock_waiters")
	}
	lasts("00:00:03")
	d.do(`do $$ declare f record; begin
		for f in select pg_get_functiondef(oid) as text from pg_proc where pronamespace = 'public'::regnamespace and prosrc like '%interval ''3 seconds''%' loop
			execute replace(f.text, 'interval ''3 seconds''', 'interval ''1 hour''');
		end loop; end $$`)
	lasts("01:00:00")
	d.do("delete from distributed_locks")
}

// message is the error of a call.
func (s *session) message(call string) string {
	s.t.Helper()
	_, err := s.query(call)
	return fmt.Sprint(err)
}

func TestAcquireInTurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	shared := install(t)
	shared.linger()
	for name, test := range map[string]func(d *database){
		"callers and processes are served in the order of their tickets": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('k', 'first')", "true")
			ta := a.joins("k", "A")
			tp := p.queue(0, "k")
			tb := b.joins("k", "B")
			a.refused("k", "A", ta)
			d.want("release_lock('k', 'first')", "true")
			d.want(wake(0, "k", "NULL"), "1 "+ta)
			b.refused("k", "B", tb)
			p.want(take("k", "P", tp), stepBack)
			p.want(take("k", "Q", "0"), stepBack) // a process that comes now
			a.want(inTurn("k", "A", ta), "t")
			a.want("assert_lock_held('k', 'A') = (select fencing_token from distributed_locks)", "true")
			a.want("release_lock('k', 'A')", "true")
			b.refused("k", "B", tb)
			p.want(take("k", "P", tp), granted("P"))
			b.refused("k", "B", tb)
			p.want("pgxlock_release_one('k', 'P', null)", "R") // B waits
			b.want(inTurn("k", "B", tb), "t")
		},
		"an answer that was lost is found again": func(d *database) {
			a, b := d.sessions()
			d.want("acquire_lock('k', 'first')", "true")
			ta := a.joins("k", "A")
			tb := b.joins("k", "B")
			a.want(inTurn("k", "A", "null"), "f "+ta)
			d.want("release_lock('k', 'first')", "true")
			a.want(inTurn("k", "A", ta), "t")
			token := d.get("select fencing_token from distributed_locks")
			for _, ticket := range []string{ta, "null"} {
				a.want(inTurn("k", "A", ticket), "t")
				a.want("(acquire_in_turn('k', 'A', 3600, "+ticket+")).fencing_token", token)
			}
			b.refused("k", "B", tb)
			d.want("select string_agg(owner, ' ') from pgxlock_waiters", "B")
		},
		"a caller that died is passed after the wake timeout, or when its ticket is void": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('k', 'first')", "true")
			ta := a.joins("k", "A")
			tp := p.queue(0, "k")
			tb := b.joins("k", "B")
			d.want("release_lock('k', 'first')", "true")
			d.do("update pgxlock_waiters set live_until = 'infinity' where ticket = " + ta)
			b.refused("k", "B", tb) // it has A woken, because no release did
			d.want("select woken is not null from pgxlock_waiters where ticket = "+ta, "true")
			p.want(take("k", "P", tp), stepBack)
			d.pass(ta)
			b.refused("k", "B", tb)
			p.hears("0:k")
			p.want(take("k", "P", tp), granted("P"))

			d.do("update pgxlock_waiters set live_until = clock_timestamp() where ticket = " + ta)
			a.want("(select acquired or ticket <= "+tb+" from acquire_in_turn('k', 'A', 3600, "+ta+"))", "false") // at the end
		},
		"a ticket is the caller's own": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('k', 'first') and acquire_lock('l', 'first') and acquire_lock('k#1', 'first')", "true")
			ta, tp := a.joins("k", "A"), p.queue(0, "k")
			other := d.as(d.role())
			d.do("select grant_locks('" + other.get("select session_user") + "', 'application')")
			for call, who := range map[string]*session{
				inTurn("k", "B", ta): b, inTurn("l", "A", ta): a, inTurn("k", "A", tp): a, inTurn("k", "A", ta): other,
				shareInTurn("k", "B", ta): b, permitsInTurn("k", "A", 1, 1, ta): a,
			} {
				if got := who.message(call); !strings.Contains(got, "22023") || !strings.Contains(got, "p_ticket") {
					t.Errorf("%s: %s", call, got)
				}
			}
			other.want("leave_queue('k', 'A')", "false")
			a.refused("k", "A", ta)
			a.want(inTurn("k", "A", "1000000")+" like 'f %'", "true") // as one that is void and removed
			d.do("delete from distributed_locks")
		},
		"leaving wakes the next one": func(d *database) {
			a, p := d.connect(), d.process()
			d.want("acquire_lock('k', 'first')", "true")
			ta, tp := a.joins("k", "A"), p.queue(0, "k")
			d.want("select protocol from pgxlock_waiters where ticket = "+ta, "1")
			d.want("release_lock('k', 'first')", "true")
			d.want(wake(0, "k", "NULL"), "1 "+ta)
			a.want("leave_queue('k', 'A')", "true")
			p.hears("0:k")
			p.want(take("k", "P", tp), granted("P"))
			a.want("leave_queue('k', 'A')", "false")
			d.want("select count(*) from pgxlock_waiters", "0")
		},
		"in a transaction that stays open": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('k', 'first')", "true")
			a.begin(readCommitted)
			ta := a.joins("k", "A")
			tp := p.queue(0, "k")
			d.want("release_lock('k', 'first')", "true")
			p.want(take("k", "P", tp), granted("P")) // which sees no ticket, and waits for none
			if got := a.message(inTurn("k", "A", ta)); !strings.Contains(got, "25001") || !strings.Contains(got, "is not committed") {
				t.Errorf("the second call says %s", got)
			}
			a.rollback()
			d.want("select count(*) from pgxlock_waiters", "0")
			p.want("pgxlock_release_one('k', 'P', null)", "r")

			d.want("acquire_lock('k', 'first') and acquire_permit('k', 'first', 1) = 'k#1'", "true")
			for _, ask := range []func(ticket string) string{
				func(ticket string) string { return shareInTurn("k", "A", ticket) },
				func(ticket string) string { return permitsInTurn("k", "A", 1, 1, ticket) },
			} {
				a.begin(readCommitted)
				ta := a.joinsBy(ask("null"))
				if got := a.message(ask(ta)); !strings.Contains(got, "25001") || !strings.Contains(got, "is not committed") {
					t.Errorf("the second call says %s", got)
				}
				a.rollback()
			}
			d.want("release_all_locks('first')", "2")

			// A ticket that was not committed yet, at the end of a subtransaction.
			d.want("acquire_lock('k', 'first')", "true")
			a.begin(readCommitted)
			a.do("savepoint s")
			ta = a.joins("k", "A")
			a.do("release s; savepoint s")
			a.want(inTurn("k", "A", ta), "25001")
			a.rollback()
			d.want("release_lock('k', 'first')", "true")

			a.begin(readCommitted)
			a.want(inTurn("k", "A", "null"), "t")
			tb := b.joins("k", "B") // refused without waiting
			a.commit()
			b.refused("k", "B", tb)
		},
		"a ticket that another transaction has locked": func(d *database) {
			a, b := d.sessions()
			d.want("acquire_lock('k', 'first')", "true")
			ta := a.joins("k", "A")
			d.want("release_lock('k', 'first')", "true")
			b.begin(readCommitted)
			b.want("wake_lock_waiter('k')", "true")
			a.refused("k", "A", ta)
			b.commit()
			a.want(inTurn("k", "A", ta), "t")
			d.want("select count(*) from pgxlock_waiters", "0")
		},
		"above READ COMMITTED": func(d *database) {
			for _, level := range levels[1:] {
				a, b := d.sessions()
				a.do("set default_transaction_isolation = " + quote(level))
				d.want("acquire_lock('k', 'first')", "true")
				ta := a.joins("k", "A")
				tb := b.joins("k", "B")
				b.refused("k", "B", tb)
				d.want("release_lock('k', 'first')", "true")
				b.refused("k", "B", tb)
				a.want(inTurn("k", "A", ta), "t")
				b.want("leave_queue('k', 'B')", "true")
				a.begin(level)
				d.do("delete from distributed_locks")
				d.want("acquire_lock('k', 'first')", "true")
				a.want(inTurn("k", "A", "null"), "40001")
				a.rollback()
				a.want("leave_queue('k', 'A')", "25001")
				d.want("release_lock('k', 'first')", "true")
				a.do("reset default_transaction_isolation")
				a.done()
				b.done()
			}
		},
		"of a circle the last ticket fails": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('a', 'A') and acquire_lock('b', 'B') and acquire_lock('p', 'P')", "true")
			ta := a.joins("b", "A")
			b.want(inTurn("a", "B", "null"), "40P01")
			a.refused("b", "A", ta)
			d.want("select count(*) from pgxlock_waiters", "1")

			p.want("select deadlock from "+p.publishes(0, "a", "NULL", asJSON("P")), "NULL")
			d.want("release_lock('b', 'B') and acquire_lock('b', 'P')", "true")
			p.want("select deadlock from "+p.publishes(0, "a", "NULL", asJSON("P")), "P") // which now waits for A
			d.do("delete from pgxlock_waiters")
			p.queueHolding(0, "a", "P")
			a.want(inTurn("p", "A", "null"), "40P01")

			// One that a ticket joins only later is found when it is refreshed.
			d.do("delete from pgxlock_waiters")
			d.want("release_lock('p', 'P') and acquire_lock('p', 'another')", "true")
			p.queueHolding(0, "a", "P")
			ta = a.joins("p", "A")
			d.want("release_lock('p', 'another') and acquire_lock('p', 'P')", "true")
			a.refused("p", "A", ta)
			d.do("update pgxlock_waiters set live_until = clock_timestamp() + interval '10 min' where ticket = " + ta)
			a.want(inTurn("p", "A", ta), "40P01")

			d.want("acquire_shared_lock('s', 'A')", "true")
			a.want(inTurn("s", "A", "null"), "40P01") // no share becomes an exclusive lease
		},
		"readers in a row are served together, and no writer is passed": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('k', 'first')", "true")
			ta := a.joinsBy(shareInTurn("k", "A", "null"))
			tw := p.queue(0, "k")
			tb := b.joinsBy(shareInTurn("k", "B", "null"))
			d.want("release_lock('k', 'first')", "true")
			b.want(shareInTurn("k", "B", tb), "f "+tb)
			d.woken(ta, true) // because no release did
			a.want(shareInTurn("k", "A", ta), "t")
			p.hears("0:k") // it may be another reader
			p.want(take("k", "W", tw), busy("*shared"))
			b.want(shareInTurn("k", "B", tb), "f "+tb)
			d.woken(tw, false)                         // it was refused, and waits
			a.want(shareInTurn("k", "A", "null"), "t") // it has one
			tc := d.joinsBy(shareInTurn("k", "C", "null"))
			d.want("release_shared_lock('k', 'B')", "false")
			d.want("release_shared_lock('k', 'A')", "true")
			b.want(shareInTurn("k", "B", tb), "f "+tb)
			p.hears("0:k")
			p.want(take("k", "W", tw), granted("W"))
			p.want("pgxlock_release_one('k', 'W', null)", "R")
			d.want(shareInTurn("k", "C", tc), "f "+tc)
			b.want(shareInTurn("k", "B", tb), "t")
			d.woken(tc, true)
			d.want(shareInTurn("k", "C", tc), "t")
			d.wantShares("k", "B", "C")
			for _, ticket := range []string{tb, "null"} { // an answer that was lost
				b.want(shareInTurn("k", "B", ticket), "t")
			}
			b.want("(select fencing_token from acquire_shared_in_turn('k', 'B')) = (select fencing_token from distributed_locks)", "true")
			d.want("select count(*) from pgxlock_waiters", "0")
		},
		"a reader that died is passed": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want("acquire_lock('k', 'first')", "true")
			ta := a.joinsBy(shareInTurn("k", "A", "null"))
			tb := b.joinsBy(shareInTurn("k", "B", "null"))
			tp := p.queue(0, "k")
			d.want("release_lock('k', 'first')", "true")
			d.want("acquire_shared_lock('k', 'R')", "true") // as long as it is shared nobody has reason to wake A
			d.do("update pgxlock_waiters set live_until = 'infinity' where ticket = " + ta)
			b.want(shareInTurn("k", "B", tb), "f "+tb)
			d.woken(ta, false)
			d.do("update pgxlock_waiters set live_until = clock_timestamp() + interval '10 min' where ticket = " + tb)
			b.want(shareInTurn("k", "B", tb), "f "+tb) // but that it refreshes its ticket
			d.woken(ta, true)
			d.pass(ta)
			b.want(shareInTurn("k", "B", tb), "t")
			p.want(take("k", "W", tp), busy("*shared"))
		},
		"permits are acquired all or none, and a larger request is not passed": func(d *database) {
			a, b, p := d.connect(), d.connect(), d.process()
			d.want(permitsInTurn("jobs", "first", 3, 3, "null"), "t jobs#1,jobs#2,jobs#3")
			ta := a.joinsBy(permitsInTurn("jobs", "A", 3, 2, "null"))
			tb := b.joinsBy(permitsInTurn("jobs", "B", 3, 1, "null"))
			tp := p.queue(0, "jobs#")
			d.want("release_lock('jobs#2', 'B')", "false")
			d.want("release_lock('jobs#2', 'first')", "true")
			a.want(permitsInTurn("jobs", "A", 3, 2, ta), "f "+ta)
			b.want(permitsInTurn("jobs", "B", 3, 1, tb), "f "+tb)
			d.woken(ta, false) // it waits for another one
			p.want(takePermit("jobs", "P", 3, tp), "f t first")
			d.want("select count(*) from distributed_locks where holder_id <> 'first'", "0")
			d.want("(select bool_and(release_lock(n, 'first')) from unnest('{jobs#1,jobs#3}'::text[]) n)", "true")
			b.want(permitsInTurn("jobs", "B", 3, 1, tb), "f "+tb)
			a.want(permitsInTurn("jobs", "A", 3, 2, ta)+" ~ '^t jobs#[1-3],jobs#[1-3]$'", "true")
			d.woken(tb, true) // there is one more
			b.want(permitsInTurn("jobs", "B", 3, 1, tb)+" ~ '^t jobs#[1-3]$'", "true")
			p.hears("") // and there is none
			d.want("select string_agg(lock_name, ' ' order by lock_name) from distributed_locks", "jobs#1 jobs#2 jobs#3")
			p.want("("+takePermit("jobs", "P", 3, tp)+") ~ '^f f [AB]$'", "true")
			d.want("(select count(*) from distributed_locks l where release_lock(l.lock_name, 'A'))", "2")
			d.want("wake_lock_waiter('jobs#')", "true")
			p.hears("0:jobs#")
			p.want("("+takePermit("jobs", "P", 3, tp)+") ~ '^t f [1-3]$'", "true")
		},
		"permits that an unanswered call has acquired are found again": func(d *database) {
			a, b := d.sessions()
			d.want("acquire_lock('jobs#1', 'first')", "true")
			a.begin(readCommitted)
			first := a.get(permitsInTurn("jobs", "A", 4, 1, "null"))
			ticket := b.joinsBy(permitsInTurn("jobs", "A", 4, 1, "null")) // while it is still running
			a.commit()
			tokens := d.get("select array_agg(fencing_token)::text from distributed_locks where holder_id = 'A'")
			for _, ticket := range []string{ticket, "null"} {
				b.want(permitsInTurn("jobs", "A", 4, 1, ticket), first)
				b.want("(acquire_permits_in_turn('jobs', 'A', 4, 1, 3600, "+ticket+")).fencing_tokens::text", tokens)
			}
			if got := b.message(permitsInTurn("jobs", "A", 4, 2, "null")); !strings.Contains(got, "22023") || !strings.Contains(got, "has 1 permits") {
				t.Errorf("for another number it says %s", got)
			}
			d.want("select count(*) from distributed_locks", "2")
			d.want("select count(*) from pgxlock_waiters", "0")
			d.expire(strings.TrimPrefix(first, "t "))
			b.want(permitsInTurn("jobs", "A", 4, 2, "null")+" ~ '^t jobs#[2-4],jobs#[2-4]$'", "true")
			for _, level := range levels[1:] {
				a.begin(level)
				a.want(permitsInTurn("jobs", "B", 4, 1, "null"), "25001")
				a.rollback()
			}
		},
		"a caller for permits that died is passed": func(d *database) {
			a, b := d.sessions()
			d.want(permitsInTurn("jobs", "first", 2, 2, "null"), "t jobs#1,jobs#2")
			ta := a.joinsBy(permitsInTurn("jobs", "A", 2, 1, "null"))
			tb := b.joinsBy(permitsInTurn("jobs", "B", 2, 1, "null"))
			d.want("release_lock('jobs#2', 'first')", "true")
			d.do("update pgxlock_waiters set live_until = 'infinity' where ticket = " + ta)
			b.want(permitsInTurn("jobs", "B", 2, 1, tb), "f "+tb)
			d.do("update pgxlock_waiters set live_until = clock_timestamp() + interval '10 min' where ticket = " + tb)
			b.want(permitsInTurn("jobs", "B", 2, 1, tb), "f "+tb)
			d.woken(ta, true)
			d.pass(ta)
			b.want(permitsInTurn("jobs", "B", 2, 1, tb), "t jobs#2")
			a.want(permitsInTurn("jobs", "A", 2, 1, ta), "f "+ta)
			a.want("leave_queue('jobs#', 'A')", "true")
		},
		"shares and permits in a circle": func(d *database) {
			a, b := d.sessions()
			d.want("acquire_lock('k', 'A')", "true")
			a.want(shareInTurn("k", "A", "null"), "40P01") // its own
			d.want("acquire_shared_lock('s', 'B')", "true")
			ta := a.joins("s", "A")
			b.want(shareInTurn("k", "B", "null"), "40P01")
			a.refused("s", "A", ta)
			d.do("delete from pgxlock_waiters")

			// A reader whose try met a change of the group waits for that change, and for none of the readers.
			d.want("acquire_lock('x', 'C')", "true")
			d.joins("x", "B")
			a.begin(readCommitted)
			a.want("extend_shared_lock('s', 'B')", "true")
			tc := b.joinsBy(shareInTurn("s", "C", "null"))
			a.commit()
			b.want(shareInTurn("s", "C", tc), "t")
			b.want("release_shared_lock('s', 'C')", "true")
			d.do("delete from pgxlock_waiters")

			d.want(permitsInTurn("mails", "B", 2, 1, "null")+" like 't %'", "true")
			d.want(permitsInTurn("mails", "C", 2, 1, "null")+" like 't %'", "true")
			ta = a.joinsBy(permitsInTurn("mails", "A", 2, 1, "null"))
			tb := b.joinsBy(shareInTurn("k", "B", "null")) // C may release its own
			d.want(shareInTurn("k", "C", "null"), "40P01")
			b.want(shareInTurn("k", "B", tb), "f "+tb)
			a.want(permitsInTurn("mails", "A", 2, 1, ta), "f "+ta)
			d.do("delete from pgxlock_waiters")
			b.joins("k", "B")
			d.joins("k", "C")
			a.want(permitsInTurn("mails", "A", 2, 1, "null"), "40P01")
			d.do("delete from pgxlock_waiters")

			d.want(permitsInTurn("order", "C", 1, 1, "null"), "t order#1")
			d.joins("s", "C")
			b.want(permitsInTurn("order", "B", 1, 1, "null"), "40P01")
		},
		"readers that come later do not pass": func(d *database) {
			a := d.connect()
			d.want("acquire_shared_lock('k', 'R')", "true")
			ta := a.joins("k", "A")
			d.want("(select acquired or not ahead from pgxlock_try_in_turn('{k}', '{S}', '{1000}', '{null}', '{0}', true))", "false")
			a.refused("k", "A", ta)
			d.want("release_shared_lock('k', 'R')", "true")
			a.want(inTurn("k", "A", ta), "t")
		},
		"the pause is a quarter of the hold for each in the queue": func(d *database) {
			d.want("acquire_lock('k', 'first')", "true")
			pause := func(holder, since string) string {
				d.do("update distributed_locks set acquired_at = clock_timestamp() - interval '" + since + "'")
				return d.get("(select ask_again_ms from acquire_in_turn('k', '" + holder + "', 3600))")
			}
			d.do("update distributed_locks set acquired_at = clock_timestamp() + interval '1 h'")
			d.want("(select ask_again_ms from acquire_in_turn('k', 'A', 3600))", "5")
			d.want("(select ask_again_ms from acquire_in_turn('k', 'B', 3600))", "10")
			d.do("update distributed_locks set acquired_at = 'infinity'")
			d.want("(select ask_again_ms from acquire_in_turn('k', 'A', 3600))", "10")
			if got := pause("A", "1 h"); got != "150" {
				t.Errorf("after an hour: %s", got)
			}
			var first, second int
			_, _ = fmt.Sscan(pause("A", "0.1 s"), &first)
			if _, _ = fmt.Sscan(pause("B", "0.1 s"), &second); first < 25 || second < 50 {
				t.Errorf("after a tenth of a second: %d and %d ms", first, second)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := shared.reopen(t)
			d.do("delete from pgxlock_waiters; delete from distributed_lock_shares")
			test(d)
		})
	}
}
