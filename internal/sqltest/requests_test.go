// claim_request() and answer_request(): which caller does the work, and what the others receive.

package sqltest_test

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// request is the outcome of claim_request(), with the answer if there is one.
func request(key, fingerprint, wait string) string {
	return fmt.Sprintf("select concat_ws(' ', outcome, convert_from(answer, 'UTF8')) from claim_request(%s, %s, %s)", quote(key), quote(fingerprint), wait)
}

// answer calls answer_request(), which returns nothing.
func answer(key, fingerprint, text string) string {
	return fmt.Sprintf("answer_request(%s, %s, %s)", quote(key), quote(fingerprint), quote(text))
}

// answered answers a request in a transaction of its own.
func (d *database) answered(key, fingerprint, text string) {
	d.t.Helper()
	d.do(fmt.Sprintf("begin; select claim_request(%s, %s, NULL, '1 hour'); select %s; commit", quote(key), quote(fingerprint), answer(key, fingerprint, text)))
}

func TestRequestIsAnsweredByOneCommittedTransaction(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			d.do("delete from pgxlock_claims")
			s := d.begin(level)
			s.want(request("k", "f", wait), "first")
			s.want(answer("k", "f", "undone"), "")
			s.rollback()
			d.want("select count(*) from pgxlock_claims", "0")
			s.begin(level)
			s.want(request("k", "f", wait), "first")
			s.want(answer("k", "f", "done"), "")
			s.commit()
			for _, mode := range []string{"", " read only"} {
				s.begin(level + mode)
				s.want(request("k", "f", wait), "answered done")
				s.want(request("k", "g", wait), "other")
				s.want("claim_once('k', "+wait+")", "false")
				d.leavesNothing(s)
				s.rollback()
			}
			s.done()
		}
	})
}

// The first transaction has not ended: nobody knows whether its answer will be the answer. The key is
// new, or had an answer that has ended.
func TestRequestThatIsUndecidedIsPending(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, expired := range []bool{false, true} {
			for _, end := range []string{"commit", "rollback"} {
				for _, wait := range []string{forever, long} {
					d.do("delete from pgxlock_claims")
					if expired {
						d.answered("k", "f", "old")
						d.endClaim("k")
					}
					first := d.begin(level)
					first.want(request("k", "f", forever), "first")
					first.want(answer("k", "f", "new"), "")
					s := d.begin(level)
					for _, wait := range []string{none, brief} {
						s.want(request("k", "f", wait), "pending")
						s.want(request("k", "g", wait), "pending")
					}
					waiting := s.start(request("k", "f", wait))
					waiting.waitsFor(first)
					first.do(end)
					switch {
					case end == "rollback":
						waiting.want("first")
					case level == readCommitted:
						waiting.want("answered new")
					default:
						waiting.want("40001")
					}
					s.done()
					first.done()
				}
			}
		}
	})
}

func TestRequestOfItsOwnTransactionIsAnsweredOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		for _, wait := range waits {
			d.do("delete from pgxlock_claims")
			s := d.begin(level)
			s.want(request("k", "f", wait), "first")
			s.want(request("k", "f", wait), "first") // still to be done
			s.do("savepoint a")
			s.want(answer("k", "f", "undone"), "")
			s.want(request("k", "f", wait), "answered undone")
			s.do("rollback to a")
			s.want(request("k", "f", wait), "first")
			s.want(answer("k", "f", "kept"), "")
			s.want(request("k", "f", wait), "answered kept")
			s.want(request("k", "g", wait), "other")
			s.do("savepoint b")
			s.want(answer("k", "f", "again"), "55000")
			s.do("rollback to b")
			s.commit()
			s.done()
			d.want(request("k", "f", none), "answered kept")
		}
	})
}

func TestAnswerIsStoredByTheTransactionThatClaimedAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("select claim_once('claimed')")
		d.answered("answered", "f", "true")
		open := d.begin(level)
		open.want(request("open", "f", none), "first")
		s := d.begin(level)
		s.do("insert into pgxlock_claims values ('restored', now() - interval '1 hour', NULL, pg_current_xact_id())")
		d.do("select claim_once('just claimed')")
		for _, key := range []string{"new", "claimed", "just claimed", "answered", "open", "restored"} {
			s.do("savepoint a")
			s.want(answer(key, "f", "forged"), "55000")
			s.do("rollback to a")
		}
		s.commit()
		s.done()
		open.done()
		d.want(request("answered", "f", none), "answered true")

		// With autocommit each statement is a transaction.
		d.want(request("autocommit", "f", none), "first")
		d.want(answer("autocommit", "f", "late"), "55000")
		for _, key := range []string{"autocommit", "claimed"} { // they have no answer
			d.want(request(key, "f", none), "other")
		}
	})
}

func TestAnswerLastsForItsRetention(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	atEveryLevel(t, func(t *testing.T, d *database, level string) {
		d.do("begin; select claim_request('for good', 'f'); select " + answer("for good", "f", "kept") + "; commit")
		d.do("update pgxlock_claims set claimed_at = claimed_at - interval '10 years'")
		d.want("select expires_at - claimed_at > interval '36500 days' from pgxlock_claims", "true")
		d.answered("purged", "f", "old")
		d.endClaim("purged")
		d.want("purge_claims('0')", "1")
		d.want(request("for good", "f", none), "answered kept")

		// Nothing of an answer is left when its key is claimed again, with an answer or without.
		for claim, want := range map[string]string{request("k", "g", none): "first", request("k", "f", none): "first", "claim_once('k')": "true"} {
			d.do("delete from pgxlock_claims")
			d.answered("k", "f", "old")
			d.endClaim("k")
			s := d.begin(level)
			s.want(claim, want)
			s.want("select fingerprint is null and answer is null from pgxlock_claims", "true")
			s.commit()
			s.done()
			d.want(request("k", "f", none), "other")
		}
	})
}

func TestRequestThatIsPurgedWhileItIsReadIsClaimed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`alter function claim_once(text, interval, interval) rename to claim_once_itself;
		create function claim_once(p_key text, p_max_wait interval, p_retention interval) returns boolean language plpgsql as $$
		declare v_first boolean := claim_once_itself(p_key, p_max_wait, p_retention);
		begin
			if not v_first then delete from pgxlock_claims; end if;
			return v_first;
		end $$`)
	d.answered("k", "f", "old")
	d.want(request("k", "f", forever), "first")
}

func TestAnswerHasAtMostAMebibyte(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	of := func(bytes int) string {
		return fmt.Sprintf("answer_request('k', 'f', decode(repeat('00', %d), 'hex'))", bytes)
	}
	s := d.begin(readCommitted)
	s.want(request("k", "f", none), "first")
	s.do("savepoint a")
	for _, refused := range []string{of(1<<20 + 1), "answer_request('k', 'f', NULL)"} {
		s.want(refused, "22023")
		s.do("rollback to a")
	}
	s.want(of(1<<20), "")
	s.commit()
	d.want("select octet_length(answer) from claim_request('k', 'f')", "1048576")
	d.answered("empty", "f", "")
	d.want("select outcome || octet_length(answer) from claim_request('empty', 'f')", "answered0")
}
