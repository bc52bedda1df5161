// Advisory locks with tokens: the tokens that sessions draw, the rows that an unlock leaves,
// and the outcome of a batch that fails.

package sqltest_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// op is what pgxlock_advisory_batch can be told to do.
type op int

const (
	lock op = iota
	lockShared
	unlock
	unlockShared
	ofTwoInts // is added for keys of two integers
)

// refused is the answer to what was not done.
const refused = "NULL"

// An entry of a batch.
type entry struct {
	op op
	id int64
}

// holder is a session that holds locks.
type holder struct {
	*session
	d      *database
	number int64 // which stands for it
}

// holder opens a session for locks, and makes it one.
func (d *database) holder() *holder {
	d.t.Helper()
	h := &holder{d.connect(), d, rand.Int64()}
	h.do("select " + h.batch())
	return h
}

// batch is the call of a batch.
func (h *holder) batch(entries ...entry) string {
	var ops, ids []string
	for _, e := range entries {
		ops, ids = append(ops, fmt.Sprint(int(e.op))), append(ids, fmt.Sprint(e.id))
	}
	return fmt.Sprintf("pgxlock_advisory_batch('{%s}', '{%s}', %d)", strings.Join(ops, ","), strings.Join(ids, ","), h.number)
}

// answers runs a batch.
func (h *holder) answers(entries ...entry) []string {
	h.t.Helper()
	return strings.Split(strings.Trim(h.get(h.batch(entries...)), "{}"), ",")
}

// try runs a batch of one; a refusal must leave nothing behind.
func (h *holder) try(op op, id int64) string {
	h.t.Helper()
	before := h.d.locks(h.session)
	answer := h.answers(entry{op, id})[0]
	if after := h.d.locks(h.session); answer == refused && after != before {
		h.t.Errorf("refused, and what it holds went from %s to %s", before, after)
	}
	return answer
}

// lock locks a key exclusively, which must be granted.
func (h *holder) lock(id int64) (token int64) {
	h.t.Helper()
	token, err := strconv.ParseInt(h.try(lock, id), 10, 64)
	if err != nil {
		h.t.Fatalf("key %d: %v", id, err)
	}
	return token
}

// share locks a key shared, which must be granted.
func (h *holder) share(id int64) (token int64) {
	h.t.Helper()
	token, err := strconv.ParseInt(h.try(lockShared, id), 10, 64)
	if err != nil {
		h.t.Fatalf("key %d: %v", id, err)
	}
	return token
}

// must checks the answer to a batch of one.
func (h *holder) must(op op, id int64, want string) {
	h.t.Helper()
	if got := h.try(op, id); got != want {
		h.t.Errorf("operation %d on %d: got %s, want %s", op, id, got, want)
	}
}

// fence is the call of a fence of a key of one bigint.
func (h *holder) fence(id, token int64) string {
	return fmt.Sprintf("assert_advisory_lock_held(1, %d, %d, %d)", id, h.number, token)
}

// end ends the session, and returns when its locks are free.
func (h *holder) end() {
	h.t.Helper()
	h.d.do(fmt.Sprintf("select pg_terminate_backend(%d)", h.pid))
	await(h.t, h.d, fmt.Sprintf("not exists (select from pg_locks where pid = %d) and not exists (select from pg_stat_activity where pid = %[1]d)", h.pid))
}

// rows counts what the table says of advisory locks.
const rows = "select count(*) from pgxlock_advisory_locks"

func TestSessionLockIsGrantedToOneAtATimeWithGrowingTokens(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b := d.holder(), d.holder()
	seen := &tokens{t: t}
	for range 3 {
		for _, h := range []*holder{a, b} {
			other := map[*holder]*holder{a: b, b: a}[h]
			seen.next("an unlock", h.lock(1))
			d.want("pg_try_advisory_xact_lock(1)", "false") // it is PostgreSQL's own lock
			other.must(lock, 1, refused)
			other.must(lockShared, 1, refused)
			other.must(unlock, 1, refused)
			h.must(lock, 1, refused) // the server would grant it again
			h.must(lockShared, 1, refused)
			h.must(unlockShared, 1, refused)
			h.must(unlock, 1, "1")
			h.must(unlock, 1, refused)
			d.want(rows, "0")
		}
	}
	seen.next("an advisory lock", d.token("k", "A")) // one sequence for leases and these
	seen.next("a lease", a.lock(1))
}

func TestSharedSessionLocksAreGrantedToManyWithTokensThatGrow(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b, writer := d.holder(), d.holder(), d.holder()
	seen := &tokens{t: t}
	for range 2 {
		seen.next("a writer", a.share(1))
		a.must(lockShared, 1, refused)
		seen.next("a reader", b.share(1))
		writer.must(lock, 1, refused)
		a.must(unlockShared, 1, "1")
		writer.must(lock, 1, refused)
		b.must(unlock, 1, refused)
		b.must(unlockShared, 1, "1")
		seen.next("the readers", writer.lock(1))
		a.must(lockShared, 1, refused)
		writer.must(unlock, 1, "1")
		d.want(rows, "0")
	}
}

// Readers that come at the same moment are no reason to refuse one another, even
// while the row of the other is not committed.
func TestReadersDoNotRefuseOneAnother(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a, b := d.holder(), d.holder()
	a.do("begin")
	a.share(1)
	b.share(1)
	a.do("commit; begin")
	a.must(unlockShared, 1, "1")
	b.must(unlockShared, 1, "1")
	b.share(1)
	a.commit()
}

func TestKeySpacesArePostgreSQLsOwn(t *testing.T) {
	t.Parallel()
	d := install(t)
	h := d.holder()
	const most, least = 1<<31 - 1, -1 << 31
	for _, pair := range [][2]int32{{0, 0}, {0, 1}, {1, 0}, {0, -1}, {-1, 0}, {-1, -2}, {most, least}, {least, most}, {7, least}} {
		id := int64(pair[0])<<32 | int64(uint32(pair[1]))
		two := fmt.Sprintf("pg_try_advisory_xact_lock(%d, %d)", pair[0], pair[1])
		one := fmt.Sprintf("pg_try_advisory_xact_lock(%d)", id)
		for _, shared := range []op{0, 1} {
			h.try(lock+shared+ofTwoInts, id)
			d.want(two, "false")
			d.want(one, "true")
			h.try(lock+shared, id)
			d.want(one, "false")
			d.want("select string_agg(key_space || ' ' || key_id, ',' order by key_space) from pgxlock_advisory_locks", fmt.Sprintf("1 %d,2 %[1]d", id))
			h.must(unlock+shared+ofTwoInts, id, "1")
			d.want(two, "true")
			d.want(one, "false")
			h.must(unlock+shared, id, "1")
			d.want(one, "true")
		}
	}
}

func TestBatchAnswersInOrder(t *testing.T) {
	t.Parallel()
	d := install(t)
	a, b := d.holder(), d.holder()
	b.lock(2)
	got := a.answers(entry{lock, 1}, entry{lock, 2}, entry{lockShared, 3}, entry{unlock, 4}, entry{lock + ofTwoInts, 1}, entry{lock, 5})
	if got[1] != refused || got[3] != refused {
		t.Errorf("%q", got)
	}
	seen := &tokens{t: t}
	for _, i := range []int{0, 2, 4, 5} {
		token, _ := strconv.ParseInt(got[i], 10, 64)
		seen.next("the entry before", token)
		d.want("select count(*) from pgxlock_advisory_locks where token = "+got[i], "1")
	}
	got = a.answers(entry{unlock, 1}, entry{lock, 1}, entry{unlockShared, 3}, entry{lock, 3}) // handed on, and upgraded
	if got[0] != "1" || got[2] != "1" || slices.Contains(got, refused) || slices.Contains(got, "0") {
		t.Errorf("%q", got)
	}
	b.must(lock, 1, refused)
	b.must(lockShared, 3, refused)
	a.answers(entry{unlock, 1}, entry{unlock + ofTwoInts, 1}, entry{unlock, 3}, entry{unlock, 5})
	d.want("(select count(*) from pgxlock_advisory_locks where session = "+fmt.Sprint(a.number)+")", "0")
	a.want(a.batch(), "{}")
}

func TestBatchThatMakesNoSenseLocksNothing(t *testing.T) {
	t.Parallel()
	d := install(t)
	h := d.holder()
	before := d.locks(h.session)
	for _, arguments := range []string{
		"'{0,8}', '{1,2}', me", "'{0,-1}', '{1,2}', me", "'{0,null}', '{1,2}', me", "'{0,0}', '{1,null}', me", "'{0,0}', '{1}', me",
		"'{0}', '{1,2}', me", "null, '{1}', me", "'{0}', null, me", "'{0}', '{1}', null",
	} {
		h.want("pgxlock_advisory_batch("+strings.ReplaceAll(arguments, "me", fmt.Sprint(h.number))+")", "22023")
	}
	for _, level := range levels[1:] {
		h.begin(level)
		h.want(h.batch(entry{lock, 1}), "25001")
		h.rollback()
	}
	if after := d.locks(h.session); after != before {
		t.Errorf("it holds %s, and held %s", after, before)
	}
	// The number is another connection's; as behind a pooler.
	other := &holder{d.connect(), d, h.number}
	other.want(other.batch(entry{lock, 1}), "55000")
	other.want(other.batch(entry{unlock, 1}), "55000")
	h.end()
	other.lock(1) // nobody's now
}

// A lock that is held twice by the server's count would need two unlocks.
func TestKeyCannotBeLockedTwiceInOneBatch(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	h, other := d.holder(), d.holder()
	for _, again := range []op{lock, lockShared} {
		h.want(h.batch(entry{lock, 1}, entry{again, 1}), "23505")
		h.undo(entry{lock, 1}, entry{again, 1})
		other.lock(1)
		other.must(unlock, 1, "1")
	}
}

// undo does what the comment of pgxlock_advisory_batch tells to do after a batch
// failed.
func (h *holder) undo(entries ...entry) {
	h.t.Helper()
	for i := range entries {
		entries[i].op |= unlock
	}
	h.answers(entries...)
}

// The server's lock table is full half-way through.
func TestBatchThatFailsHalfWayIsUndone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, d := private(t, map[string]string{"fsync": "off", "max_locks_per_transaction": "10", "max_connections": "20"})
	h, other := d.holder(), d.holder()
	h.lock(1)
	h.share(2)
	empty := d.locks(other.session)
	entries := []entry{{unlock, 1}, {unlockShared, 2}}
	for id := int64(3); id < 5000; id++ {
		entries = append(entries, entry{lock + op(id%2), id})
	}
	h.want(h.batch(entries...), "53200")
	if got := d.locks(h.session); got == empty {
		t.Fatalf("it holds %s: nothing was left to undo", got)
	}
	d.want(rows, "2") // as if it had not unlocked them
	h.undo(entries...)
	if got := d.locks(h.session); got != empty {
		t.Errorf("after the undo it holds %s", got)
	}
	for id := int64(1); id < 10; id++ {
		h.lock(id)
	}
}

// What the server does to advisory locks no rollback takes back: the rows are as
// before, the locks are not.
func TestBatchThatIsRolledBackIsUndone(t *testing.T) {
	t.Parallel()
	d := install(t)
	for _, overtaken := range []bool{false, true} {
		h, other := d.holder(), d.holder()
		seen := &tokens{t: t}
		old := h.lock(1)
		seen.next("nothing", old)
		h.do("begin")
		h.must(unlock, 1, "1")
		h.lock(2)
		h.rollback()
		d.want(fmt.Sprintf("select string_agg(key_id::text, ',') from pgxlock_advisory_locks where session = %d", h.number), "1")
		other.must(lock, 2, refused)
		if overtaken {
			seen.next("a failed unlock", other.lock(1))
			d.want(h.fence(1, old), "LK001")
		} else {
			h.must(lock, 1, refused) // it would not know that it may
		}
		h.undo(entry{unlock, 1}, entry{lock, 2})
		if overtaken {
			h.must(lock, 1, refused)
			other.must(unlock, 1, "1")
		}
		seen.next("the undo", h.lock(1))
		other.lock(2)
		h.must(unlock, 1, "1")
		other.must(unlock, 2, "1")
		d.want(rows, "0")
	}
}

// An unlock that has not committed is not an unlock yet; who tries is refused at
// once.
func TestTryNeverWaitsForAnotherBatch(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	a, b := d.holder(), d.holder()
	for _, shared := range []op{0, 1} {
		a.try(lock+shared, 1)
		a.do("begin")
		a.must(unlock+shared, 1, "1")
		b.must(lock, 1, refused)
		if shared == 1 {
			b.share(1)
		} else {
			b.must(lockShared, 1, refused)
		}
		b.must(unlockShared, 1, map[op]string{0: refused, 1: "1"}[shared])
		a.commit()
		b.lock(1)
		b.must(unlock, 1, "1")

		// Nor for a row that somebody locked by hand.
		a.try(lock+shared, 1)
		by := d.connect()
		by.do("begin; select from pgxlock_advisory_locks for update")
		a.must(unlock+shared, 1, "1")
		b.must(lock, 1, refused)
		a.must(lock, 1, refused)
		d.want("pgxlock_reap_advisory()", "0")
		by.rollback()
		b.lock(1)
		b.must(unlock, 1, "1")
		d.want(rows, "0")
	}
}

// Nothing of what is acknowledged comes again: neither the tokens of a batch that
// an open transaction drew before, nor those that this one logged for later.
func TestTokensOfSessionLocksSurviveACrash(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, d := private(t, nil)
	d.do("alter role postgres set synchronous_commit = off")
	seen := &tokens{t: t}
	for round := range 3 {
		d = open(t, d.url)
		h, other := d.holder(), d.holder()
		h.want("current_setting('synchronous_commit')", "off")
		drawn := d.begin(readCommitted) // logs the draws of all who come next, and is not flushed
		drawn.do("select pgxlock_next_tokens(1)")
		for id := range int64(5) {
			seen.next("a crash", h.lock(id))
		}
		h.want("current_setting('synchronous_commit')", "off") // raised for the batch only
		other.share(100 + int64(round))
		d = crash(t, server)
		d.want(rows, "0") // nobody holds anything
		d.want("pg_try_advisory_xact_lock(1)", "true")
	}
}

// Tokens are worth a flush, and nothing else is.
func TestOnlyTokensAreFlushed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	h := d.holder()
	h.do("set synchronous_commit = off")
	for _, c := range []struct {
		entry
		want string
	}{
		{entry{lock, 1}, "on"},
		{entry{lock, 1}, "off"},
		{entry{unlock, 1}, "off"},
		{entry{lockShared, 1}, "on"},
		{entry{lock, 1}, "off"},
		{entry{unlockShared, 1}, "off"},
	} {
		h.do("begin")
		h.do("select " + h.batch(c.entry))
		h.want("current_setting('synchronous_commit')", c.want)
		h.commit()
	}
}

func TestReapingRemovesWhatDeadSessionsLeft(t *testing.T) {
	t.Parallel()
	d := install(t)
	dead, fenced, live := d.holder(), d.holder(), d.holder()
	for id := range int64(5) {
		dead.lock(id)
		live.lock(10 + id)
	}
	token := fenced.lock(20)
	shared := live.share(21)
	fenced.share(21)
	writer := d.begin(readCommitted)
	writer.want(fenced.fence(20, token), fmt.Sprint(token))
	d.want("pgxlock_reap_advisory()", "0")
	live.want(fmt.Sprintf("pgxlock_reap_advisory(1000, %d)", live.number), "0") // which finds its own key free
	dead.end()
	fenced.end()
	for _, limit := range []string{"0", "-1", "10001", "null"} {
		d.want("pgxlock_reap_advisory("+limit+")", "22023")
	}
	d.want("pgxlock_reap_advisory(2)", "2")
	reaping := d.begin(readCommitted) // makes nobody look alive, or dead
	reaping.want("pgxlock_reap_advisory()", "4")
	d.want(fmt.Sprintf("pg_try_advisory_lock_shared(pgxlock_session_key(%d))", dead.number), "true")
	d.want(live.fence(21, shared), fmt.Sprint(shared))
	reaping.commit()
	d.want("select string_agg(key_id::text, ',' order by key_id) from pgxlock_advisory_locks", "10,11,12,13,14,20,21")
	writer.rollback()
	d.want("pgxlock_reap_advisory()", "1")

	// Given back under a fence.
	for _, op := range []op{lock, lockShared} {
		token, _ := strconv.ParseInt(live.try(op, 30), 10, 64)
		writer.begin(readCommitted)
		writer.want(live.fence(30, token), fmt.Sprint(token))
		live.must(op|unlock, 30, "1")
		d.want("pgxlock_reap_advisory()", "0")
		d.want(live.fence(30, token), "LK001")
		writer.commit()
		d.want(live.fence(30, token), "LK001")
		d.want("pgxlock_reap_advisory()", "1")
	}
}

// A row that looked given back, and was taken again before it was to be removed.
func TestReapingRemovesNothingThatWasTakenAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	h := d.holder()
	h.lock(1)
	seen := d.get("select array_agg(s) from (select key_space, key_id, session, shared, null::bigint from pgxlock_advisory_locks) s")
	d.want("pgxlock_clear_advisory("+quote(seen)+")", "0")
	d.want(rows, "1")
}
