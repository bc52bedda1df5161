// Requests to step down: which leaders they are for, and which receive them.

package sqltest_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// askToStepDown is the call that asks the holder of the lock.
func askToStepDown(kind int, name, why string) string {
	return fmt.Sprintf("pgxlock_ask_to_step_down(%d, %s, 'me', %s)", kind, quote(name), quote(why))
}

// stepDowns is the call that tells what was asked of a holder; NULL: nothing.
func stepDowns(kind int, name, holder string) string {
	return fmt.Sprintf("(select string_agg(concat_ws(' ', n, split_part(asked_by, ' ', 2), reason), ', ') from pgxlock_step_downs('{%d}', array[%s], array[%s]))", kind, quote(name), quote(holder))
}

// requests are all that there are.
const requests = "select coalesce(string_agg(concat_ws(' ', kind, name, holder, reason), ', ' order by kind, name, holder), '') from pgxlock_step_down"

func TestRequestIsForWhoHasTheLock(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want(askToStepDown(0, "k", "why"), "{}")
	d.want("acquire_lock('k', 'late') and acquire_lock('other', 'late')", "true")
	d.expire("k")
	d.want(askToStepDown(0, "k", "why"), "{}")
	d.want("acquire_shared_lock('read', 'reader')", "true")
	d.want(askToStepDown(0, "read", "why"), "{}")
	d.want(requests, "")
	d.want("acquire_lock('k', 'leader')", "true")
	d.want(askToStepDown(0, "k", "why"), "{leader}")
	d.want(askToStepDown(0, "k", "why else"), "{leader}") // the last word counts
	d.want(requests, "0 k leader why else")
	d.want("release_lock('k', 'leader') and acquire_lock('k', 'next')", "true")
	d.want(stepDowns(0, "k", "next"), "NULL")
	d.want(stepDowns(0, "other", "leader"), "NULL")
	d.want(stepDowns(1, "k", "leader"), "NULL")
	d.want(requests, "0 k leader why else")
	for range 2 { // nobody takes it away from its leader
		d.want(stepDowns(0, "k", "leader"), "1 (me) why else")
	}
	d.want("(select asked_us = (extract(epoch from asked_at) * 1000000)::bigint and ms between 0 and 600000 from pgxlock_step_downs('{0}', '{k}', '{leader}'), pgxlock_step_down)", "true")
	d.do("delete from pgxlock_step_down")

	// Of many, by their numbers; each of them has requests of its own.
	d.do("insert into pgxlock_step_down select k, n, h, now(), 'me', concat(k, n, h) from unnest('{0,1,2}'::int[]) k, unnest('{7,8}'::text[]) n, unnest('{a,b}'::text[]) h")
	d.want("(select string_agg(n || ' ' || reason, ', ' order by n) from pgxlock_step_downs('{0,1,1,2}', '{7,7,9,8}', '{a,b,b,a}'))", "1 07a, 2 17b, 4 28a")
}

// The key of an advisory lock is that of its database and kind.
func TestRequestIsForTheSessionThatHasTheAdvisoryLock(t *testing.T) {
	t.Parallel()
	d, elsewhere := install(t), install(t)
	elsewhere.do("select pg_advisory_lock(7)")
	holder, pair, waiter := d.connect(), d.connect(), d.connect()
	holder.do("select pg_advisory_lock(7)")
	pair.do("select pg_advisory_lock(0, 7)")
	waits := waiter.start("pg_advisory_lock(7)")
	waits.waitsFor(holder)
	d.want("acquire_lock('7', 'a lease')", "true")
	for kind, want := range []string{"0 7 a lease why", fmt.Sprintf("1 7 advisory:%d:1:7 why", holder.pid), fmt.Sprintf("2 7 advisory:%d:2:7 why", pair.pid)} {
		d.want("cardinality("+askToStepDown(kind, "7", "why")+")", "1")
		d.want(requests, want)
		d.do("delete from pgxlock_step_down")
	}
	holder.do("select pg_advisory_lock_shared(8)")
	pair.do("select pg_advisory_lock_shared(8)")
	d.want(askToStepDown(1, "8", "both")+fmt.Sprintf(" @> '{advisory:%d:1:8,advisory:%d:1:8}'", holder.pid, pair.pid), "true")
	holder.do("select pg_advisory_unlock(7)")
	waits.want("")
}

func TestRequestThatNobodyHearsIsForgotten(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do("insert into pgxlock_step_down select 0, 'k', h, now() - a, 'me', '' from (values ('old', interval '61 minutes'), ('locked', '61 minutes'), ('young', '59 minutes')) v (h, a)")
	other := d.begin(readCommitted)
	other.do("select from pgxlock_step_down where holder = 'locked' for update")
	d.want(askToStepDown(0, "k", "why"), "{}")
	d.want("select string_agg(holder, ' ' order by holder) from pgxlock_step_down", "locked young")

	// Asked again, it is as young as its last word.
	d.want("acquire_lock('k', 'young')", "true")
	d.want(askToStepDown(0, "k", "why"), "{young}")
	d.want("select asked_at > now() - interval '1 minute' from pgxlock_step_down where holder = 'young'", "true")
	other.rollback()
}

func TestLeadersAreToldThatThereAreRequests(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	listener := d.connect()
	listener.do("listen pgxlock_step_down")
	told := func() (n int) {
		listener.do("select 1")
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // what is there is returned all the same
		for {
			told, err := listener.conn.WaitForNotification(ctx)
			if err != nil {
				return n
			}
			if n++; told.Payload != "1:" {
				t.Errorf("they are told %q", told.Payload)
			}
		}
	}
	d.want(askToStepDown(0, "k", "why"), "{}")
	if n := told(); n != 0 {
		t.Errorf("there is nobody, and they are told %d times", n)
	}
	d.want("acquire_lock('k', 'leader')", "true")
	d.want("ask_to_step_down('k')", "true")
	if n := told(); n != 1 {
		t.Errorf("they are told %d times", n)
	}
}

func TestBadInputOfRequestsIsNamed(t *testing.T) {
	t.Parallel()
	d := install(t)
	d.want("acquire_lock('k', 'leader')", "true")
	for call, says := range map[string]string{
		"ask_to_step_down('')":                                      "p_lock_name must have 1 to 255 characters",
		"ask_to_step_down(null)":                                    "p_lock_name must have 1 to 255 characters",
		"ask_to_step_down(repeat('k', 256))":                        "p_lock_name must have 1 to 255 characters",
		"ask_to_step_down('k', null)":                               "p_reason must not be NULL",
		"ask_to_step_down('k', repeat('k', 1001))":                  "nor have more than 1000 bytes",
		"pgxlock_ask_to_step_down(3, 'k', 'me', '')":                "a lock has a kind, 0 to 2",
		"pgxlock_ask_to_step_down(-1, 'k', 'me', '')":               "a lock has a kind, 0 to 2",
		"pgxlock_ask_to_step_down(null, 'k', 'me', '')":             "a lock has a kind, 0 to 2",
		"pgxlock_ask_to_step_down(0, '', 'me', '')":                 "a name of 1 to 255 characters",
		"pgxlock_ask_to_step_down(0, 'k', null, '')":                "must not be NULL",
		"(select n from pgxlock_step_downs('{0}', '{k}', '{a,b}'))": "every lock needs a kind, a name and a holder",
	} {
		_, err := d.query(call)
		if outcome("", err) != "22023" || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%s: %v, want that %s", call, err, says)
		}
	}
	d.want(requests, "")
	d.want("ask_to_step_down('k', repeat('k', 1000))", "true")
}
