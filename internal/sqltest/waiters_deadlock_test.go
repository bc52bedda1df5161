// Tickets whose waiters hold locks: which waits for which, and which ticket of a circle has to
// leave.

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// ring makes n processes, each of which holds a lease and waits for that of the
// next one; the last one's ticket comes last. Closed, the last one waits for the
// first one's.
func (d *database) ring(n int, closed bool) (processes []*process, tickets []string) {
	d.t.Helper()
	for range n {
		processes = append(processes, d.process())
	}
	return processes, d.ringOf(processes, closed)
}

// ringOf is ring for processes that there are.
func (d *database) ringOf(processes []*process, closed bool) (tickets []string) {
	d.t.Helper()
	n := len(processes)
	for i, p := range processes {
		p.want(fmt.Sprintf("acquire_lock('l%d', 'h%d', 600)", i, i), "true")
	}
	for i, p := range processes {
		waitsFor := fmt.Sprintf("l%d", (i+1)%n)
		if i == n-1 && !closed {
			waitsFor = "other"
		}
		tickets = append(tickets, p.queueHolding(0, waitsFor, "x", fmt.Sprintf("h%d", i), "y"))
	}
	return tickets
}

func TestLastTicketOfACircleIsItsVictim(t *testing.T) {
	t.Parallel()
	d := install(t)
	processes, _ := d.ring(4, false)
	for n := 1; n <= 4; n++ {
		d.do("delete from distributed_locks; delete from pgxlock_waiters")
		ring := processes[:n]
		tickets := d.ringOf(ring, true)
		for range 2 { // no matter who asks, and how often
			for i, p := range ring {
				want := "f"
				if i == n-1 {
					want = fmt.Sprintf("f h%d", n-1)
				}
				if got := p.refreshed(0, fmt.Sprintf("l%d", (i+1)%n), tickets[i], asJSON("x", fmt.Sprintf("h%d", i), "y")); got != want {
					t.Errorf("circle of %d: ticket %d: got %q, want %q", n, i, got, want)
				}
			}
		}
	}
}

// The one that closes the circle is told with its first answer.
func TestTicketThatClosesACircleIsToldAtOnce(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b := d.process(), d.process()
	d.want("acquire_lock('la', 'A') and acquire_lock('lb', 'B')", "true")
	a.queueHolding(0, "lb", "A")
	b.want("select deadlock from "+b.publishes(0, "la", "NULL", asJSON("B")), "B")
}

func TestWithoutACircleThereIsNoVictim(t *testing.T) {
	t.Parallel()
	d := install(t)
	ring, tickets := d.ring(4, false)
	look := func(why string) {
		t.Helper()
		for i, p := range ring {
			name := fmt.Sprintf("l%d", i+1)
			if i == 3 {
				name = "other"
			}
			if got := p.get("select deadlock is null from " + p.publishes(0, name, tickets[i], asJSON("x", fmt.Sprintf("h%d", i), "y"))); got != "true" {
				t.Errorf("%s: ticket %d has to leave", why, i)
			}
		}
	}
	look("a chain")
	d.want("acquire_lock('other', 'somebody')", "true")
	look("a chain to a holder that does not wait")
	d.process().queueHolding(0, "l0", "nothing", "that", "counts")
	look("with one who waits for it")
}

// A ticket before the circle waits for it, and one behind as well: neither is
// part of it.
func TestWaiterOutsideADeadlockIsNoVictim(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	before := d.process()
	early := before.queueHolding(0, "l0", "E")
	ring, tickets := d.ring(2, true)
	late := d.process()
	late.want("select deadlock is null from "+late.publishes(0, "l1", "NULL", asJSON("L")), "true")
	before.want("select deadlock is null from "+before.publishes(0, "l0", early, asJSON("E")), "true")
	ring[0].want("select deadlock is null from "+ring[0].publishes(0, "l1", tickets[0], asJSON("h0")), "true")
	ring[1].want("select deadlock from "+ring[1].publishes(0, "l0", tickets[1], asJSON("h1")), "h1")
}

func TestEndedHoldsAndWaitsArePartOfNoDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, end := range map[string]func(d *database, ring []*process, tickets []string){
		"released": func(d *database, _ []*process, _ []string) { d.want("release_lock('l0', 'h0')", "true") },
		"expired":  func(d *database, _ []*process, _ []string) { d.expire("l0") },
		"passed on": func(d *database, _ []*process, _ []string) {
			d.do("update distributed_locks set holder_id = 'new' where lock_name = 'l0'")
		},
		"dead": func(_ *database, ring []*process, _ []string) { ring[0].die() },
		"hung": func(d *database, _ []*process, tickets []string) {
			d.do("update pgxlock_waiters set live_until = now() where ticket = " + tickets[0])
		},
		"withdrawn": func(d *database, _ []*process, tickets []string) {
			d.do("select pgxlock_withdraw_batch('{0}', '{l1}', '{" + tickets[0] + "}')")
		},
	} {
		d := install(t)
		ring, tickets := d.ring(2, true)
		look := "select deadlock from " + ring[1].publishes(0, "l0", tickets[1], asJSON("h1"))
		ring[1].want(look, "h1")
		end(d, ring, tickets)
		if got := ring[1].get(look); got != "NULL" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// A waiter for permits needs one of their holders to go on, and not all.
func TestKnotOfPermitsEndsWithItsLastTicket(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	const n = 3
	type waiter struct {
		*process
		name, ticket, holder string
	}
	var waiters []*waiter
	victim := func(want *waiter) { // nil: none
		t.Helper()
		for _, w := range waiters {
			deadlock := "NULL"
			if w == want {
				deadlock = w.holder
			}
			w.want("select deadlock from "+w.publishes(0, w.name, w.ticket, asJSON("x", w.holder, "y")), deadlock)
		}
	}
	for i := range n {
		w := &waiter{d.process(), "jobs#", "", fmt.Sprint("h", i)}
		d.want(fmt.Sprintf("acquire_permit('jobs', '%s', %d) is null", w.holder, n), "false")
		w.ticket = w.queueHolding(0, w.name, "x", w.holder, "y")
		victim(nil) // those that hold the others can release them
		waiters = append(waiters, w)
	}
	first, last := waiters[0], waiters[n-1]
	victim(last)
	d.process().queueHolding(0, "jobs#", "nothing", "that", "counts")
	victim(last)

	// A permit is free, or there is one more.
	free := d.get("select lock_name from distributed_locks where holder_id = 'h0'")
	d.expire(free)
	victim(nil)
	d.want("acquire_lock("+quote(free)+", 'h0')", "true")
	victim(last)
	d.want(fmt.Sprintf("acquire_permit('jobs', 'more', %d)", n+1), fmt.Sprint("jobs#", n+1))
	victim(nil)
	d.do(fmt.Sprintf("update pgxlock_semaphores set used_at = used_at - interval '2 minutes' where permits > %d", n)) // there was
	victim(last)

	// One of them waits for something else: for a holder that does not wait, or does.
	d.want("acquire_lock('lease', 'other')", "true")
	d.do("update pgxlock_waiters set name = 'lease' where ticket = " + first.ticket)
	first.name = "lease"
	victim(nil)
	d.do("update distributed_locks set holder_id = 'h1' where lock_name = 'lease'")
	victim(last)
	first.do("select pgxlock_withdraw_batch('{0}', '{lease}', '{" + first.ticket + "}')")
	first.ticket = first.queueHolding(0, "lease", "x", first.holder, "y")
	victim(first)
	// Not in the circle, though it waits for it.
	late := &waiter{d.process(), "lease", "", "late"}
	late.ticket = late.queueHolding(0, "lease", "x", "late", "y")
	waiters = append(waiters, late)
	victim(first)
}

// Leases and advisory keys of both kinds in one circle.
func TestCircleGoesThroughAdvisoryKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a, b, c := d.process(), d.process(), d.process()
	d.want("acquire_lock('lease', 'A')", "true")
	b.do("select pg_advisory_lock(-7)")
	c.do("select pg_advisory_lock_shared(-1, 2)")
	d.connect().do("select pg_advisory_lock_shared(-1, 2)") // another one has it, too
	hold := func(p *process, key string) string { return fmt.Sprintf("advisory:%d:%s", p.pid, key) }
	a.queueHolding(1, "-7", "A")
	tb := b.queueHolding(2, "-4294967294", hold(b, "1:-7"))
	b.want("select deadlock from "+b.publishes(2, "-4294967294", tb, asJSON(hold(b, "1:-7"))), "NULL")
	look := "select deadlock from " + c.publishes(0, "lease", "NULL", asJSON("z", hold(c, "2:-4294967294")))
	c.want(look, hold(c, "2:-4294967294"))
	// What says that it is held, and is not: released; or the like-named key of the
	// other kind.
	b.do("select pg_advisory_unlock(-7)")
	c.want(look, "NULL")
	b.do("select pg_advisory_lock(-1, -7)")
	c.want(look, "NULL")
	b.refreshed(2, "-4294967294", tb, asJSON(hold(b, "2:-7")))
	c.want(look, "NULL")
	b.refreshed(2, "-4294967294", tb, asJSON(hold(b, "1:-7")))
	b.do("select pg_advisory_lock(-7)")
	c.want(look, hold(c, "2:-4294967294"))
}

// One batch is asked for several tickets; each gets its own answer. New numbers go by the names.
func TestBatchTellsEachOfItsTickets(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.want("acquire_lock('l0', 'h0') and acquire_lock('l1', 'h1') and acquire_lock('l2', 'h2') and acquire_lock('l3', 'h3')", "true")
	p := d.process()
	p.want(fmt.Sprintf(`select string_agg(coalesce(deadlock, '-'), ' ' order by n) from pgxlock_publish_batch('{0,0,0,0,0}', '{l0,l1,l3,l2,l9}', '{null,null,null,null,null}', '{1,1,1,1,1}',
		array['["h1"]', '["h0"]', '["h2"]', '["h3"]', null], %s, 'o', 60000, 1) with ordinality as b (ticket, ask, deadlock, n)`, p.client), "- h0 h2 - -")
}
