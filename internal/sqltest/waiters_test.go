// The queue of waiters: which one is let to a lock, which one is woken, and what becomes of
// the dead.

package sqltest_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// process is what a process has for waiting: a session that listens, one for its
// calls, and the number of the former.
type process struct {
	*session // for the calls
	listener *session
	d        *database
	client   string // NULL: it cannot listen
	protocol int    // of a process that listens, one that nobody knows: it waits like any other
}

// process starts one that listens.
func (d *database) process() *process {
	d.t.Helper()
	p := &process{d.connect(), d.connect(), d, fmt.Sprint(rand.Int64()), math.MaxInt32}
	p.listener.want("pg_try_advisory_lock(pgxlock_waiter_key("+p.client+"))", "true")
	p.listener.do("listen pgxlock_" + p.client)
	return p
}

// deaf starts one that does not.
func (d *database) deaf() *process {
	d.t.Helper()
	return &process{d.connect(), d.connect(), d, "NULL", 1}
}

// die ends the session that listens, and returns when its locks are free.
func (p *process) die() {
	p.t.Helper()
	p.d.do(fmt.Sprintf("select pg_terminate_backend(%d)", p.listener.pid))
	await(p.t, p.d, fmt.Sprintf("not exists (select from pg_locks where pid = %d)", p.listener.pid))
}

// publishes is the call that publishes or refreshes one ticket; ticket and holds
// may be NULL.
func (p *process) publishes(kind int, name, ticket, holds string) string {
	return fmt.Sprintf("pgxlock_publish_batch('{%d}', array[%s], array[%s]::bigint[], '{1}', array[%s]::text[], %s, 'me', 60000, %d)",
		kind, quote(name), ticket, holds, p.client, p.protocol)
}

// queue publishes a new ticket.
func (p *process) queue(kind int, name string) (ticket string) {
	p.t.Helper()
	return p.get("select ticket from " + p.publishes(kind, name, "NULL", "NULL"))
}

// queueHolding publishes a new ticket of who holds something.
func (p *process) queueHolding(kind int, name string, holds ...string) (ticket string) {
	p.t.Helper()
	return p.get("select ticket from " + p.publishes(kind, name, "NULL", asJSON(holds...)))
}

// asJSON is the literal of an array of JSON.
func asJSON(texts ...string) string {
	return `'["` + strings.Join(texts, `","`) + `"]'`
}

// refreshed says what the refresh of a ticket answers: whether to try, and the
// deadlock.
func (p *process) refreshed(kind int, name, ticket, holds string) string {
	p.t.Helper()
	return p.get("select concat_ws(' ', ask, deadlock) from " + p.publishes(kind, name, ticket, holds))
}

// take is the call of a lone caller that takes a lease with a ticket; NULL barges, 0 has none.
func take(name, holder, ticket string) string {
	return fmt.Sprintf("select concat_ws(' ', token is not null, coalesce(ahead, false), coalesce(held_by, case when token is not null then %[2]s end)) from pgxlock_acquire_one(%[1]s, %[2]s, 60000, NULL, %[3]s)",
		quote(name), quote(holder), ticket)
}

// takeInBatch is take of one of many callers.
func takeInBatch(name, holder, ticket string) string {
	return fmt.Sprintf("select concat_ws(' ', tokens[1] is not null, coalesce(ahead[1], false), coalesce(held_by[1], case when tokens[1] is not null then %[2]s end)) from pgxlock_acquire_batch(array[%[1]s], array[%[2]s], '{60000}', '{NULL}', array[%[3]s]::bigint[])",
		quote(name), quote(holder), ticket)
}

// What take answers: granted, refused because somebody stands before, busy.
func granted(holder string) string { return "t f " + holder }

const stepBack = "f t"

func busy(holder string) string { return "f f " + holder }

// wake is the call that wakes who is first; a ticket makes it the second look.
func wake(kind int, name, ticket string) string {
	return fmt.Sprintf("select string_agg(n || ' ' || woken_ticket, ',') from pgxlock_wake_batch('{%d}', array[%s], array[%s]::bigint[])", kind, quote(name), ticket)
}

// heard says what the process was told since it was asked last. Notifications
// arrive with the answer to a statement that begins after the commit.
func (p *process) heard() string {
	p.t.Helper()
	p.listener.do("select 1")
	var payloads []string
	for {
		ctx, cancel := context.WithCancel(p.t.Context())
		cancel() // what is there is returned all the same
		n, err := p.listener.conn.WaitForNotification(ctx)
		if err != nil {
			return strings.Join(payloads, ",")
		}
		text, ok := strings.CutPrefix(n.Payload, "1:")
		if !ok {
			p.t.Errorf("the payload %q has not the form of protocol 1", n.Payload)
		}
		payloads = append(payloads, text)
	}
}

// hears wants that of it.
func (p *process) hears(want string) {
	p.t.Helper()
	if got := p.heard(); got != want {
		p.t.Errorf("it heard %q, want %q", got, want)
	}
}

// pass lets the turn time of a ticket be over, instead of waiting for it.
func (d *database) pass(ticket string) {
	d.t.Helper()
	d.do("update pgxlock_waiters set woken = woken - interval '2 h' where ticket = " + ticket)
}

// keep lets the turn of a ticket that was woken last until pass, however slow this
// machine is. See TestTurnLastsAQuarterOfASecond.
func (d *database) keep(ticket string) {
	d.t.Helper()
	d.do("update pgxlock_waiters set woken = woken + interval '1 h' where ticket = " + ticket)
}

// patient lets the functions wait for a row longer than the 100 ms after which they
// give up, for tests that look at one while it waits.
func (d *database) patient() {
	d.t.Helper()
	d.do(`do $$ declare f regprocedure; begin
		for f in select oid from pg_proc where proconfig @> '{lock_timeout=100ms}' loop
			execute format('alter function %s set lock_timeout = ''1h''', f);
		end loop; end $$`)
	d.want("exists (select from pg_proc where proconfig @> '{lock_timeout=1h}')", "true")
}

// tickets are those in the queue of a lock, in order.
func (d *database) tickets(kind int, name string) string {
	d.t.Helper()
	return d.get(fmt.Sprintf("select coalesce(string_agg(ticket::text, ' ' order by ticket), '') from pgxlock_waiters where kind = %d and name = %s", kind, quote(name)))
}

func (d *database) queueIs(kind int, name string, want ...string) {
	d.t.Helper()
	if got := d.tickets(kind, name); got != strings.Join(want, " ") {
		d.t.Errorf("the queue of %s is %q, want %q", name, got, want)
	}
}

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b, c := d.process(), d.process(), d.process()
	for _, take := range []func(name, holder, ticket string) string{take, takeInBatch} {
		d.want("acquire_lock('k', 'H')", "true")
		ta, tb, tc := a.queue(0, "k"), b.queue(0, "k"), c.queue(0, "k")
		a.want(take("k", "A", ta), busy("H"))
		b.want(take("k", "B", tb), stepBack+" H")
		d.want("release_lock('k', 'H')", "true")
		for _, w := range []struct {
			*process
			holder, ticket string
			behind         []string
		}{{a, "A", ta, []string{tb, tc}}, {b, "B", tb, []string{tc}}, {c, "C", tc, nil}} {
			d.want(take("k", "X", "0"), stepBack)
			for _, ticket := range w.behind {
				d.want(take("k", "X", ticket), stepBack)
			}
			w.want(take("k", w.holder, w.ticket), granted(w.holder))
			d.queueIs(0, "k", w.behind...)
			d.want("release_lock('k', '"+w.holder+"')", "true")
		}
		d.want(take("k", "X", "0"), granted("X"))
		d.want("release_lock('k', 'X')", "true")
	}
}

func TestCallersWithoutATicketMaySkipTheQueueAlsoInSQL(t *testing.T) {
	t.Parallel()
	d := install(t)
	p := d.process()
	ticket := p.queue(0, "k")
	d.want(take("k", "X", "0"), stepBack)
	d.want(take("k", "X", "NULL"), granted("X"))
	p.want(take("k", "A", ticket), busy("X"))
	d.want("release_lock('k', 'X') and acquire_lock('k', 'Y')", "true")
	p.want(take("k", "A", ticket), busy("Y"))
	d.queueIs(0, "k", ticket)
}

// One batch: granted, busy and refused entries, those with a ticket and those
// without, in order.
func TestBatchTakesWhatItMayAndAnswersInOrder(t *testing.T) {
	t.Parallel()
	d := install(t)
	p, q := d.process(), d.process()
	d.want("acquire_lock('busy', 'H') and acquire_lock('behind', 'H')", "true")
	first, mine := q.queue(0, "behind"), p.queue(0, "mine")
	refused := q.queue(0, "refused")
	d.want("select string_agg(concat_ws(' ', tokens[n] is not null, ahead[n], held_by[n], tokens[n] is null, remaining_ms[n] is null), ',' order by n) from pgxlock_acquire_batch('{free,busy,behind,mine,refused,barged}', '{A,B,C,D,E,F}',"+
		" '{60000,60000,60000,60000,60000,60000}', '{null,null,null,null,null,null}', '{0,0,0,"+mine+",0,null}'), generate_series(1, 6) n",
		"t f A f f,f f H t f,f t H t f,t f D f f,f t t t,t f F f f")
	d.want("select string_agg(lock_name || holder_id, ' ' order by lock_name) from distributed_locks", "bargedF behindH busyH freeA mineD")
	d.want("select string_agg(ticket::text, ' ' order by ticket) from pgxlock_waiters", first+" "+refused)
	d.want("(select cardinality(tokens) from pgxlock_acquire_batch('{}', '{}', '{}', '{}', '{}'))", "0")
	d.want("(select count(*) from pgxlock_publish_batch('{}', '{}', '{}', '{}', '{}', null, 'o', 1, 1))", "0")
	d.want("(select count(*) from pgxlock_wake_batch('{}', '{}', '{}'))", "0")
	d.want("pgxlock_notify_holders('{}', '{}')", "{}")
}

func TestDeadAreSkippedAndBuriedAtOnce(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, walk := range []string{"take", "be refused", "take in a batch", "publish", "wake"} {
		for _, kind := range []int{0, 1} {
			if kind == 1 && walk != "publish" && walk != "wake" {
				continue
			}
			dead, hung, live := d.process(), d.deaf(), d.process()
			td := dead.queue(kind, "7")
			th := hung.queue(kind, "7")
			tl := live.queue(kind, "7")
			if got := live.refreshed(kind, "7", tl, "NULL"); got != "f" {
				t.Errorf("%s: %s stands before it, and it may try: %s", walk, td, got)
			}
			dead.die()
			d.do("update pgxlock_waiters set live_until = clock_timestamp() where ticket = " + th)
			switch walk {
			case "take": // the next wake removes them
				live.want(take("7", "L", tl), granted("L"))
				d.queueIs(kind, "7", td, th)
				d.want("release_lock('7', 'L')", "true")
				d.want("wake_lock_waiter('7')", "false")
				d.queueIs(kind, "7")
				continue
			case "be refused":
				d.want("acquire_lock('7', 'H')", "true")
				live.want(take("7", "L", tl), busy("H"))
				d.queueIs(kind, "7", tl)
				d.want("release_lock('7', 'H')", "true")
			case "take in a batch":
				live.want(takeInBatch("7", "L", tl), granted("L"))
				d.queueIs(kind, "7")
				d.want("release_lock('7', 'L')", "true")
				continue
			case "publish":
				if got := live.refreshed(kind, "7", tl, "NULL"); got != "t" {
					t.Errorf("nobody stands before it, and it may not try: %s", got)
				}
			case "wake":
				d.want(wake(kind, "7", "NULL"), "1 "+tl)
				live.hears(fmt.Sprint(kind, ":7"))
			}
			d.queueIs(kind, "7", tl)
			live.do(fmt.Sprintf("select pgxlock_withdraw_batch('{%d}', '{7}', '{%s}')", kind, tl))
			d.queueIs(kind, "7")
		}
	}
	// Where nobody lives, they go as well.
	dead := d.process()
	dead.queue(0, "k")
	dead.die()
	d.want("wake_lock_waiter('k')", "false")
	d.queueIs(0, "k")
	d.want(take("k", "X", "0"), granted("X"))
}

// A dead ticket that somebody has locked is left to the next one.
func TestRowOfADeadTicketIsNotWaitedFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	dead, live := d.process(), d.process()
	td := dead.queue(0, "k")
	tl := live.queue(0, "k")
	dead.die()
	by := d.begin(readCommitted)
	by.do("select from pgxlock_waiters where ticket = " + td + " for update")
	d.want(wake(0, "k", "NULL"), "1 "+tl)
	live.refreshed(0, "k", tl, "NULL")
	live.want(take("k", "L", tl), granted("L"))
	d.want("pgxlock_reap_waiters()", "0")
	d.queueIs(0, "k", td)
	by.rollback()
	d.want("pgxlock_reap_waiters()", "1")
}

// Its process was slow, not dead: it comes back to its old place.
func TestTicketThatWasBuriedGetsItsPlaceBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	slow, other := d.process(), d.process()
	ts := slow.queue(0, "k")
	to := other.queue(0, "k")
	slow.die()
	d.want(wake(0, "k", "NULL"), "1 "+to)
	d.queueIs(0, "k", to)
	again := d.process() // as it is now
	if got := again.refreshed(0, "k", ts, "NULL"); got != "t" {
		t.Errorf("got %q", got)
	}
	d.queueIs(0, "k", ts, to)
	other.want(take("k", "O", to), stepBack)
	d.want(wake(0, "k", "NULL"), "1 "+ts)
	again.hears("0:k")
}

func TestWokenWaiterThatDoesNotTryIsPassed(t *testing.T) {
	t.Parallel()
	d := install(t)
	frozen, b, c := d.process(), d.process(), d.process()
	tf, tb, tc := frozen.queue(0, "k"), b.queue(0, "k"), c.queue(0, "k")
	d.want(wake(0, "k", "NULL"), "1 "+tf)
	d.keep(tf)
	b.want(take("k", "B", tb), stepBack) // its turn is not over
	d.want(wake(0, "k", tf), "NULL")
	d.pass(tf)
	d.want(wake(0, "k", tf), "1 "+tb)
	b.hears("0:k")
	d.keep(tb)
	c.want(take("k", "C", tc), stepBack)
	if got := b.refreshed(0, "k", tb, "NULL"); got != "t" {
		t.Errorf("got %q", got)
	}
	b.want(take("k", "B", tb), granted("B"))
	d.queueIs(0, "k", tf, tc)

	// It stays, and while it has not tried, others are woken and let to the lock.
	d.want("release_lock('k', 'B')", "true")
	d.want(wake(0, "k", "NULL"), "1 "+tc)
	d.want(wake(0, "k", tb), "NULL") // gone
	// When it tries, it may, and has its precedence back.
	frozen.want(take("k", "F", tf), granted("F"))
	d.want("release_lock('k', 'F')", "true")
	frozen.queue(0, "k")
	d.do("update pgxlock_waiters set woken = clock_timestamp() - interval '1 s' where ticket = " + tc)
	d.want("acquire_lock('k', 'H')", "true")
	c.want(take("k", "C", tc), busy("H"))
	d.want(wake(0, "k", "NULL"), "1 "+tc)
}

// An advisory lock is asked for elsewhere, so who was refused it says so.
func TestWaiterThatWasRefusedAnAdvisoryLockIsNotPassed(t *testing.T) {
	t.Parallel()
	for _, kind := range []int{1, 2} {
		d := install(t)
		a, b, slow := d.process(), d.process(), d.process()
		ta, tb, ts := a.queue(kind, "7"), b.queue(kind, "7"), slow.queue(kind, "8")
		d.want(wake(kind, "7", "NULL"), "1 "+ta)
		d.want(wake(kind, "8", "NULL"), "1 "+ts)
		d.pass(ts)
		stamp := d.get("select woken from pgxlock_waiters where ticket = " + ts)
		a.do(fmt.Sprintf("select pgxlock_refused_batch('{%d,%[1]d,%d}', '{7,7,7}', '{%s,%s,%[3]s}')", kind, 3-kind, ta, tb))
		d.want("select string_agg(ticket::text, ' ' order by ticket) from pgxlock_waiters where woken is null", ta+" "+tb)
		d.want("select woken from pgxlock_waiters where ticket = "+ts, stamp)
		d.pass(ta)
		if got := b.refreshed(kind, "7", tb, "NULL"); got != "f" {
			t.Errorf("who came later may try: %s", got)
		}
		d.want(wake(kind, "7", "NULL"), "1 "+ta)

		// Whose row is locked is left to its next try.
		by := d.begin(readCommitted)
		by.do("select from pgxlock_waiters for update")
		a.do(fmt.Sprintf("select pgxlock_refused_batch('{%d}', '{7}', '{%s}')", kind, ta))
		d.want("select woken is null from pgxlock_waiters where ticket = "+ta, "false")
		by.done()
	}
}

// The other tests do not wait for it, and do not hurry.
func TestTurnLastsAQuarterOfASecond(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want("pgxlock_wake_timed_out(clock_timestamp())", "false")
	d.want("pgxlock_wake_timed_out(clock_timestamp() - interval '251 ms')", "true")
	d.want("pgxlock_wake_timed_out(NULL)", "false")
	p := d.process()
	ticket := p.queue(0, "k")
	before := d.get("clock_timestamp()")
	d.want(wake(0, "k", "NULL"), "1 "+ticket)
	d.want("select woken between "+quote(before)+" and clock_timestamp() from pgxlock_waiters", "true")
}

// Others come and go faster than the turn time: each of them wakes the frozen
// one, and its turn is over all the same.
func TestWakingAgainDoesNotProlongATurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	frozen, b := d.process(), d.process()
	tf, tb := frozen.queue(0, "k"), b.queue(0, "k")
	d.want(wake(0, "k", "NULL"), "1 "+tf)
	d.keep(tf)
	stamp := d.get("select woken from pgxlock_waiters where ticket = " + tf)
	d.want(wake(0, "k", "NULL"), "1 "+tf)
	frozen.hears("0:k,0:k")
	d.want("select woken from pgxlock_waiters where ticket = "+tf, stamp)
	d.pass(tf)
	d.want(wake(0, "k", "NULL"), "1 "+tb)
	// A refresh says that the process lives, and not that it tries.
	frozen.do("update pgxlock_waiters set live_until = clock_timestamp() + interval '1 s' where ticket = " + tf)
	frozen.refreshed(0, "k", tf, "NULL")
	d.want("select live_until > clock_timestamp() + interval '30 s' from pgxlock_waiters where ticket = "+tf, "true")
	b.want(take("k", "B", tb), granted("B"))
}

// Where all were passed by, the next release would wake nobody; so they are woken
// one after the other, and then it ends.
func TestThoseWhoWerePassedAreWokenWhereThereIsNobodyElse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a, b := d.process(), d.process()
	ta, tb := a.queue(0, "k"), b.queue(0, "k")
	d.do("update pgxlock_waiters set woken = clock_timestamp() - interval '1 s'")
	d.want(wake(0, "k", "NULL"), "1 "+ta)
	a.hears("0:k")
	b.hears("")
	d.want(wake(0, "k", ta), "1 "+tb)
	b.hears("0:k")
	d.want(wake(0, "k", tb), "NULL")
	a.hears("")
}

func TestWakeNotifiesTheFirstWaiterOfEachLock(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b, deaf := d.process(), d.process(), d.deaf()
	ta, tb := a.queue(0, "k"), b.queue(0, "k")
	other, key, two := b.queue(0, "o:1"), a.queue(1, "-7"), b.queue(2, "-7")
	none := deaf.queue(0, "deaf")
	d.want("select string_agg(protocol::text, ' ' order by ticket) from pgxlock_waiters", fmt.Sprint(strings.Repeat(fmt.Sprint(a.protocol, " "), 5), deaf.protocol))
	d.want("(select string_agg(n || ' ' || woken_ticket, ',' order by n) from pgxlock_wake_batch('{2,0,0,1,0,0,0}', '{-7,k,o:1,-7,k,free,deaf}', '{null,null,null,null,null,null,null}'))",
		fmt.Sprintf("1 %s,2 %s,3 %s,4 %s,7 %s", two, ta, other, key, none))
	a.hears("0:k,1:-7")
	b.hears("0:o:1,2:-7")
	d.want("select string_agg(ticket::text, ' ' order by ticket) from pgxlock_waiters where woken is null", tb)
	a.want(take("k", "A", ta), granted("A"))
	d.want("release_lock('k', 'A')", "true")
	d.want("wake_lock_waiter('k')", "true")
	a.hears("")
	b.hears("0:k")
	d.want("wake_lock_waiter('free')", "false")
}

// Who cannot be stamped is told all the same: a wake-up must not get lost.
func TestWakeDoesNotWaitForTheRowAndTells(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	p := d.process()
	ticket := p.queue(0, "k")
	by := d.begin(readCommitted)
	by.do("select from pgxlock_waiters for update")
	d.want(wake(0, "k", "NULL"), "1 "+ticket)
	p.hears("0:k")
	d.want("select woken is null from pgxlock_waiters", "true")
	p.want(take("k", "P", "NULL"), granted("P"))
	p.want(take("k", "Q", ticket), busy("P"))
	by.rollback()
}

// Both sides commit, then look. Step by step, each order of the two.
func TestWakeUpIsNotLostBetweenPublishAndRelease(t *testing.T) {
	t.Parallel()
	d := install(t)
	p, holder := d.process(), d.connect()

	// Published before the release, and seen by its look.
	holder.want(take("k", "H", "0"), granted("H"))
	ticket := p.queue(0, "k")
	holder.want("release_lock('k', 'H')", "true")
	holder.want(wake(0, "k", "NULL"), "1 "+ticket)
	p.hears("0:k")
	p.want(take("k", "P", ticket), granted("P"))
	holder.want("release_lock('k', 'P')", "true")

	// Published, not committed, when the releaser looks: the first try after the
	// commit finds it free.
	holder.want(take("k", "H", "0"), granted("H"))
	p.begin(readCommitted)
	ticket = p.queue(0, "k")
	holder.want("release_lock('k', 'H')", "true")
	holder.want(wake(0, "k", "NULL"), "NULL")
	p.commit()
	if got := p.refreshed(0, "k", ticket, "NULL"); got != "t" {
		t.Errorf("got %q", got)
	}
	p.want(take("k", "P", ticket), granted("P"))
	holder.want("release_lock('k', 'P')", "true")

	// Published and committed while the release is not: the try is busy, and the
	// look that follows the release sees the ticket.
	holder.want(take("k", "H", "0"), granted("H"))
	holder.begin(readCommitted)
	holder.want("release_lock('k', 'H')", "true")
	ticket = p.queue(0, "k")
	p.want(take("k", "P", ticket), busy("H"))
	holder.commit()
	holder.want(wake(0, "k", "NULL"), "1 "+ticket)
	p.hears("0:k")
}

// A try under way found the lock busy, and takes away the stamp: the older one,
// or the one of the release that came just then. If the process freezes now, its
// ticket looks like one that nobody woke.
func TestTryThatTakesAStampAwayLosesNoTurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	for _, c := range []struct {
		kind       int
		name       string
		lock, free func(*session)
	}{
		{0, "k", func(s *session) { s.want(take("k", "H", "NULL"), granted("H")) }, func(s *session) { s.want("release_lock('k', 'H')", "true") }},
		{1, "7", func(s *session) { s.do("select pg_advisory_lock(7)") }, func(s *session) { s.do("select pg_advisory_unlock(7)") }},
		{2, "-4294967294", func(s *session) { s.do("select pg_advisory_lock(-1, 2)") }, func(s *session) { s.do("select pg_advisory_unlock(-1, 2)") }},
	} {
		frozen, next, holder := d.process(), d.process(), d.connect()
		c.lock(holder)
		tf, tn := frozen.queue(c.kind, c.name), next.queue(c.kind, c.name)
		d.want(wake(c.kind, c.name, "NULL"), "1 "+tf) // of somebody who barged in between
		frozen.heard()
		d.do("update pgxlock_waiters set woken = null where ticket = " + tf) // what its try does
		d.want(wake(c.kind, c.name, tf), "NULL")                             // it is held: its holder will check when it releases
		frozen.begin(readCommitted)
		frozen.do("update pgxlock_waiters set woken = null where ticket = " + tf)
		c.free(holder)
		holder.want(wake(c.kind, c.name, "NULL"), "1 "+tf) // not stamped
		frozen.commit()
		frozen.hears(fmt.Sprint(c.kind, ":", c.name))
		holder.want(wake(c.kind, c.name, tf), "1 "+tf) // the second look: once more
		d.pass(tf)
		holder.want(wake(c.kind, c.name, tf), "1 "+tn)
		next.hears(fmt.Sprint(c.kind, ":", c.name))
	}
}

func TestTryThatFailsShowsLife(t *testing.T) {
	t.Parallel()
	d := install(t)
	p, q := d.process(), d.process()
	tp, tq := p.queue(0, "k"), q.queue(0, "k")
	const stamps = "select coalesce(string_agg((woken is null)::text, ' ' order by ticket), '') from pgxlock_waiters"
	d.do("update pgxlock_waiters set woken = clock_timestamp()")
	d.keep(tp)
	q.want(take("k", "Q", tq), stepBack)
	d.want(stamps, "false true")
	d.want("acquire_lock('k', 'H')", "true")
	p.want(take("k", "P", tp), busy("H"))
	d.want(stamps, "true true")
	// Somebody has its row locked: the answer does not wait.
	d.do("update pgxlock_waiters set woken = clock_timestamp()")
	by := d.begin(readCommitted)
	by.do("select from pgxlock_waiters for update")
	p.want(take("k", "P", tp), busy("H"))
	by.rollback()
	d.want(stamps, "false false")
}

// Uncontended, a wake reads; and a refresh writes once in half of a ticket's time.
func TestFilesAreWrittenOnlyWhereNeeded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	p := d.process()
	const xid = "pg_current_xact_id_if_assigned()"
	unchanged := func(call string, want bool) {
		t.Helper()
		p.begin(readCommitted)
		p.do("select * from " + call)
		if got := p.get(xid) == "NULL"; got != want {
			t.Errorf("%s: without a transaction id: %t, want %t", call, got, want)
		}
		p.commit()
	}
	unchanged("pgxlock_wake_batch('{0,1}', '{k,7}', '{null,null}')", true)
	unchanged("wake_lock_waiter('k')", true)
	unchanged("pgxlock_withdraw_batch('{0,1}', '{k,7}', '{1,2}')", true)
	unchanged("pgxlock_refused_batch('{0,1}', '{k,7}', '{1,2}')", true)
	unchanged("pgxlock_waited_for('{0,1}', '{k,7}')", true)
	ticket := p.queue(0, "k")
	unchanged(p.publishes(0, "k", ticket, "NULL"), true)
	unchanged(p.publishes(0, "k", ticket, asJSON("X")), false)
	unchanged(p.publishes(0, "k", ticket, asJSON("X")), true)
	d.do("update pgxlock_waiters set live_until = clock_timestamp() + interval '45 s'")
	unchanged(p.publishes(0, "k", ticket, asJSON("X")), true)
	d.do("update pgxlock_waiters set live_until = clock_timestamp() + interval '29 s'")
	unchanged(p.publishes(0, "k", ticket, asJSON("X")), false)
	unchanged(p.publishes(0, "k", ticket, asJSON("X")), true)
	unchanged(strings.Replace(p.publishes(0, "k", ticket, asJSON("X")), "'{1}'", "'{2}'", 1), false)
	p.client = d.process().client
	unchanged(p.publishes(0, "k", ticket, "NULL"), false)
	d.queueIs(0, "k", ticket)
	d.want("select concat_ws(' ', client, waiters, cardinality(holds)) from pgxlock_waiters", p.client+" 1 0")
	// A try that is busy, and was not woken.
	d.want("acquire_lock('k', 'H')", "true")
	p.begin(readCommitted)
	p.want(take("k", "P", ticket), busy("H"))
	p.want(xid, "NULL")
	p.commit()
}

// A commit that has nothing to flush does not wait for a synchronous standby,
// either: where none answers, who flushes is seen.
func TestWakingFlushesNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, d := private(t, nil)
	p := d.process()
	d.do("vacuum") // who first reads a page of the catalogs may tidy it, and that is logged
	all := func() {
		ticket := p.queue(0, "k")
		for range 5 {
			d.do("update pgxlock_waiters set woken = null")
			d.want(wake(0, "k", "NULL"), "1 "+ticket)
		}
		p.hears("0:k,0:k,0:k,0:k,0:k")
		p.do("select * from " + p.publishes(0, "k", ticket, asJSON("X")))
		p.do("select pgxlock_withdraw_batch('{0}', '{k}', '{" + ticket + "}')")
		d.queueIs(0, "k")
	}
	all()
	d.do("alter system set synchronous_standby_names = 'nobody'")
	d.do("select pg_reload_conf()")
	s := d.connect()
	acquire := s.start("acquire_lock('l', 'H')")
	// The process that puts the setting into force may hear of it later.
	for late := time.Now().Add(patience); !acquire.waits(fmt.Sprintf("exists (select from pg_stat_activity where pid = %d and wait_event = 'SyncRep')", s.pid)); {
		acquire.want("true")
		if time.Now().After(late) {
			t.Fatal("nobody waits for a standby")
		}
		acquire = s.start("acquire_lock('l', 'H')") // which renews it
	}

	all()
	d.want(fmt.Sprintf("pg_cancel_backend(%d)", s.pid), "true")
	acquire.want("true")
}

// Whatever the order of a batch: while it waits for the first of its rows, it has
// none of the others.
func TestBatchLocksItsTicketsInOneOrder(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.patient()
	p := d.process()
	first := p.queue(0, "a")
	then := p.get("select ticket from " + p.publishes(0, "b", first, "NULL")) // of one number
	second, other := p.queue(0, "a"), d.connect()
	for _, call := range []string{
		"(select count(*) from pgxlock_publish_batch('{0,0}', '{b,a}', '{%[1]s,%[1]s}', '{2,2}', '{null,null}', %[3]s, 'me', 60000, 1))",
		"(select count(*) from pgxlock_publish_batch('{0,0}', '{a,a}', '{%[2]s,%[1]s}', '{3,3}', '{null,null}', %[3]s, 'me', 60000, 1))",
		"(select count(*) from pgxlock_acquire_batch('{b,a}', '{X,Y}', '{60000,60000}', '{null,null}', '{%[1]s,%[1]s}'))",
		"pgxlock_withdraw_batch('{0,0}', '{b,a}', '{%[1]s,%[1]s}')",
	} {
		call = fmt.Sprintf(call, first, second, p.client)
		by := d.begin(readCommitted)
		by.do("select from pgxlock_waiters where name = 'a' and ticket = " + then + " for update")
		waiting := d.connect().start(call)
		waiting.waitsFor(by)
		other.do("begin")
		other.do("select from pgxlock_waiters where name <> 'a' or ticket <> " + then + " for update nowait") // nobody has them
		other.rollback()
		by.rollback()
		if got := waiting.outcome(); len(got) == 5 {
			t.Errorf("%s: %s", call, got)
		}
		p.refreshed(0, "a", first, "NULL")
		p.refreshed(0, "b", first, "NULL")
		d.do("delete from distributed_locks")
	}
}

// Calls with the same locks in other orders wait for each other in one order. There is one
// way left: who removes the dead has locked its own tickets by then, skips what is locked, and
// yet waits for a session that locks a row's new version at that moment, as SKIP LOCKED does. Since the
// dead are taken in one order as well that was not seen in 300,000 calls; where one of the
// functions has another order, it is one of three hundred.
func TestSoakBatchesInAnyOrderNeverDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const locks, workers = 12, 6
	rounds := pgtest.Soak(t, 60, 2000)
	d := install(t)
	d.do("select setval('pgxlock_tickets', 1000)") // the numbers below are given
	var working sync.WaitGroup
	var deadlocks atomic.Int32
	for w := range workers {
		p := d.process()
		p.do("set deadlock_timeout = '10ms'") // less than the lock_timeout of the functions, which a busy machine may reach
		random := rand.New(rand.NewPCG(rand.Uint64(), 0))
		working.Go(func() {
			for range rounds {
				if t.Failed() {
					return
				}
				var kinds, names, tickets, nulls, ones, holders, ttls []string
				for _, i := range random.Perm(locks) {
					kinds, names, tickets = append(kinds, "0"), append(names, fmt.Sprint(i)), append(tickets, fmt.Sprint(1+i*workers+random.IntN(workers)))
					nulls, ones, holders, ttls = append(nulls, "null"), append(ones, "1"), append(holders, fmt.Sprint(w)), append(ttls, "1")
				}
				list := func(what []string) string { return "'{" + strings.Join(what, ",") + "}'" }
				live := []string{"1", "60000"}[random.IntN(2)]
				call := []string{
					fmt.Sprintf("(select count(*) from pgxlock_publish_batch(%s, %s, %s, %s, %s, %s, 'o', %s, 1))", list(kinds), list(names), list(tickets), list(ones), list(nulls), p.client, live),
					fmt.Sprintf("pgxlock_withdraw_batch(%s, %s, %s)", list(kinds), list(names), list(tickets)),
					fmt.Sprintf("pgxlock_refused_batch(%s, %s, %s)", list(kinds), list(names), list(tickets)),
					fmt.Sprintf("(select count(*) from pgxlock_wake_batch(%s, %s, %s))", list(kinds), list(names), list(nulls)),
					fmt.Sprintf("(select count(*) from pgxlock_acquire_batch(%s, %s, %s, %s, %s))", list(names), list(holders), list(ttls), list(nulls), list(tickets)),
				}[random.IntN(5)]
				switch got := p.outcome(call); {
				case got == "40P01":
					deadlocks.Add(1)
				case len(got) == 5 && got != "55P03":
					t.Errorf("%s: %s", call, got)
				}
			}
		})
	}
	working.Wait()
	if n := deadlocks.Load(); n > 1 {
		t.Errorf("%d deadlocks in %d calls", n, workers*rounds)
	}
}

func TestCallThatMakesNoSenseDoesNothing(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, call := range []string{
		"pgxlock_publish_batch('{0,0}', '{k}', '{null}', '{1}', '{null}', 1, 'o', 1000, 1)", "pgxlock_publish_batch('{0}', '{k}', null, '{1}', '{null}', 1, 'o', 1000, 1)",
		"pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 1, null, 1000, 1)", "pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 1, 'o', 0, 1)",
		"pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 1, 'o', null, 1)", "pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 1, 'o', 1000, null)", "pgxlock_publish_batch('{3}', '{k}', '{null}', '{1}', '{null}', 1, 'o', 1000, 1)",
		"pgxlock_publish_batch('{0}', '{null}', '{null}', '{1}', '{null}', 1, 'o', 1000, 1)", "pgxlock_publish_batch('{0}', array[repeat('x', 256)], '{null}', '{1}', '{null}', 1, 'o', 1000, 1)",
		"pgxlock_acquire_batch('{k}', '{A}', '{1}', '{null}', '{}')", "pgxlock_acquire_batch(null, null, null, null, null)", "pgxlock_acquire_batch('{k}', '{A}', '{1}', '{null,null}', '{0}')",
		"pgxlock_wake_batch('{0}', '{k}', '{}')", "pgxlock_wake_batch(null, '{k}', '{null}')", "pgxlock_withdraw_batch('{0}', '{k,l}', '{1,1}')",
		"pgxlock_withdraw_batch(null, null, null)", "pgxlock_refused_batch('{1}', '{7,8}', '{1,1}')", "pgxlock_refused_batch(null, null, null)", "pgxlock_waited_for('{1}', '{}')", "pgxlock_waited_for(null, null)", "wake_lock_waiter(null)", "acquire_in_turn(null, 'A')", "acquire_in_turn('k', null)", "acquire_in_turn('k', 'A', null)", "acquire_in_turn('k', 'A', 30, 0)", "acquire_shared_in_turn(null, 'A')", "acquire_shared_in_turn('k', '')", "acquire_shared_in_turn('k', '*shared')",
		"acquire_permits_in_turn(null, 'A', 1)", "acquire_permits_in_turn('', 'A', 1)", "acquire_permits_in_turn('k', null, 1)", "acquire_permits_in_turn('k', '*A', 1)", "acquire_permits_in_turn('k', 'A', null)", "acquire_permits_in_turn('k', 'A', 0)",
		"acquire_permits_in_turn('k', 'A', 2, null)", "acquire_permits_in_turn('k', 'A', 2, 0)", "acquire_permits_in_turn('k', 'A', 2, 2, null)", "acquire_permits_in_turn('k', 'A', 2, 2, 30, 0)", "leave_queue(null, 'A')", "leave_queue('k', null)", "pgxlock_notify_holders('{1}', '{}')", "pgxlock_notify_holders(null, null)", "pgxlock_reap_waiters(0)",
	} {
		d.want("(select count(*) from "+call+")", "22023")
	}
	for _, level := range levels[1:] {
		s := d.begin(level)
		for _, call := range []string{
			"pgxlock_publish_batch('{0}', '{k}', '{null}', '{1}', '{null}', 1, 'o', 1000, 1)", "pgxlock_acquire_batch('{k}', '{A}', '{1}', '{null}', '{0}')",
			"pgxlock_wake_batch('{0}', '{k}', '{null}')", "wake_lock_waiter('k')",
		} {
			s.do("savepoint s")
			s.want("(select count(*) from "+call+")", "25001")
			s.do("rollback to s")
		}
		s.done()
	}
	d.want("select count(*) from pgxlock_waiters", "0")
	d.want("select count(*) from distributed_locks", "0")
	// Odd data that others wrote is in nobody's way.
	d.do("insert into pgxlock_waiters values (1, 'seven', -1, null, '', -1, 'infinity', 'infinity', '-infinity', '{NULL,advisory:x}'), (9, '', 0, 7, '', 0, now(), 'infinity', null, '{}')")
	p := d.process()
	if got := p.get("select concat_ws(' ', ask, deadlock) from " + p.publishes(1, "7", "NULL", asJSON("advisory:", `\"`))); got != "t" {
		t.Errorf("got %q", got)
	}
	d.want("(select count(*) from pgxlock_wake_batch('{1,9,9,null}', '{seven,\"\",null,null}', '{null,null,-1,null}'))", "1")
	d.want("(select string_agg(ask::text, ' ') from pgxlock_publish_batch('{0,0}', '{x,x}', array[(select last_value from pgxlock_tickets), (select last_value from pgxlock_tickets)], '{1,2}', '{null,\"7\"}', null, 'o', 1000, 1))", "true true") // twice the same
}

func TestHoldersOfKeysAreTold(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b := d.process(), d.process()
	for _, p := range []*process{a, b} {
		p.listener.do(fmt.Sprintf("listen pgxlock_holder_%d", p.pid))
	}
	a.do("select pg_advisory_lock(7), pg_advisory_lock_shared(7), pg_advisory_lock_shared(-1, 2)")
	b.do("select pg_advisory_lock_shared(-1, 2), pg_advisory_lock(8)")
	c := d.connect().start("pg_advisory_lock(7)") // waits, and has nothing
	c.waitsFor(a.session)
	d.want("pgxlock_notify_holders('{1,2,1,2,0,null}', '{7,-4294967294,-4294967294,7,7,8}')", "{1,2,0,0,0,0}")
	a.hears("1:7,2:-4294967294")
	b.hears("2:-4294967294")
	a.do("select pg_advisory_unlock_all()")
	c.outcome()
}

func TestReapingRemovesTheTicketsOfTheDead(t *testing.T) {
	t.Parallel()
	d := install(t)
	dead, live := d.process(), d.process()
	for i := range 3 {
		dead.queue(0, fmt.Sprint(i))
	}
	tl := live.queue(0, "k")
	d.want("pgxlock_reap_waiters()", "0")
	dead.die()
	d.want("pgxlock_reap_waiters(2)", "2")
	d.want("pgxlock_reap_waiters()", "1")
	d.queueIs(0, "k", tl)
	d.do("update pgxlock_waiters set live_until = now()")
	d.want("pgxlock_reap_waiters()", "1")
}
