package sqltest_test

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// Programs in other languages, and older ones of ours, compute the same keys.
func TestAdvisoryLockKeysNeverChange(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t)
	for encoding, eAcute := range map[string]string{"UTF8": `U&'\00e9'`, "LATIN1": "chr(233)", "SQL_ASCII": `E'\303\251'`} {
		if testing.Short() && encoding != "UTF8" {
			continue
		}
		t.Run(encoding, func(t *testing.T) {
			d := installEncoded(t, server, encoding)
			d.want("getdatabaseencoding()", encoding)
			d.want("advisory_lock_key('invoice:42')", "6688477336110245193")
			d.want("advisory_lock_key("+eAcute+")", "5375421630974772051")
			d.want("advisory_lock_key(NULL)", "NULL")
			d.want("advisory_lock_key_in('billing', 'invoice:42')", "1572001551135567388")
			d.want("advisory_lock_key_in("+eAcute+", "+eAcute+") = advisory_lock_key_in('x', "+eAcute+")", "false")
			d.want("advisory_lock_key_in(NULL, 'invoice:42')", "NULL")
			// Leases, too, work in every encoding.
			d.want("acquire_lock("+eAcute+", 'A')", "true")
			d.want("acquire_lock("+eAcute+", 'B')", "false")
			d.want("assert_lock_held("+eAcute+", 'A') > 0", "true")
			d.want("release_lock("+eAcute+", 'A')", "true")
			// And so do the locks and claims of transactions.
			d.want("claim_once("+eAcute+")", "true")
			d.want("claim_once("+eAcute+", '1 s')", "false")
			d.do("begin")
			d.want("lock_tx("+eAcute+")", "true")
			d.want("(select (classid::bigint << 32) | objid::bigint from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())", "5375421630974772051")
			d.do("commit")
		})
	}
}

// installEncoded makes a database with another encoding, and pgxlock in it.
func installEncoded(t *testing.T, other *pgtest.DB, encoding string) *database {
	t.Helper()
	name := other.Name + "_" + strings.ToLower(encoding)
	other.Exec(t, "create database "+name+" template template0 encoding "+quote(encoding)+" lc_collate 'C' lc_ctype 'C'")
	t.Cleanup(func() {
		conn := pgtest.Connect(t, other.URL)
		if _, err := conn.Exec(context.Background(), "drop database "+name+" with (force)"); err != nil {
			t.Error(err)
		}
	})
	config, err := pgx.ParseConfig(other.URL)
	if err != nil {
		t.Fatal(err)
	}
	config.Database = name
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	d := &database{t: t, session: &session{t: t, conn: conn, pid: conn.PgConn().PID()}}
	files, err := fs.Glob(migrations.FS, "*.up.sql") // sorted
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		file, err := migrations.FS.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		d.do(string(file))
	}
	return d
}

// The keys of leases are a mark and a hash whose seed is of the table, which another installation
// does not share, and of the purpose. Programs use the seed 0.
func TestInternalKeysAreAMarkAndAHashWithASeedOfTheirOwn(t *testing.T) {
	t.Parallel()
	d := install(t)
	const key, hash = "to_hex(pgxlock_key(%s, %s))", `'706c6a' || right(lpad(to_hex(hashtextextended(%s collate "C", %s)), 16, '0'), 10)`
	for _, name := range []string{"order:42", "é", ""} {
		for _, space := range []string{"guard", "pin"} {
			seed := `hashtextextended('` + space + `' collate "C", 'distributed_locks'::regclass::oid::bigint)`
			d.want(seed+" <> 0", "true")
			d.want(fmt.Sprintf(key+" = "+hash, quote(space), quote(name), quote(name), seed), "true")
			d.want(fmt.Sprintf(key+" <> "+hash, quote(space), quote(name), quote(name), "0"), "true")
		}
		d.want("pgxlock_key('guard', "+quote(name)+") <> pgxlock_key('pin', "+quote(name)+")", "true")
	}
}

// A session that lives never has the guard or the pin of a lease, whatever they hash to: what it
// holds for as long as it lives differs in a bit from what a transaction holds.
func TestKeysOfASessionAreNeverThoseOfAMoment(t *testing.T) {
	t.Parallel()
	d := install(t)
	const mark = "to_hex(%s >> 40)"
	for of, want := range map[string]string{
		"pgxlock_key('guard', 'k')": "706c6a", "pgxlock_key('pin', 'k')": "706c6a", "pgxlock_key('names', '')": "706c6a",
		"pgxlock_share_pin('k', 'h')": "706c6a", "pgxlock_advisory_pin(1, 42, 7)": "706c6a",
		"pgxlock_session_key(7)": "706c6b", "pgxlock_waiter_key(7)": "706c6b",
	} {
		d.want(fmt.Sprintf(mark, of), want)
		d.want(fmt.Sprintf("pgxlock_is_own_key(1, %s)", of), "true")
		d.want(fmt.Sprintf("pgxlock_is_own_key(2, %s)", of), "false") // keys of two integers are users' alone
	}
	for _, users := range []string{"advisory_lock_key('invoice:42')", "0", "-1", "(9223372036854775807)", "(-9223372036854775807)"} {
		d.want("pgxlock_is_own_key(1, "+users+")", "false")
	}
	d.want("(select count(distinct k) from generate_series(1, 1000) i, unnest(array[pgxlock_session_key(i), pgxlock_waiter_key(i)]) k)", "2000")
}

// 40 bits of a hash can be equal. Then the two exclude each other while somebody holds the key; here
// all are equal.
func TestEqualKeysOfDifferentLocksExcludeAndGrantNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	d.do(`create or replace function pgxlock_own_key(p_lasting boolean, p_content bytea) returns bigint language sql immutable parallel safe
		return (case when p_lasting then 'x706c6b0000000000' else 'x706c6a0000000000' end)::bit(64)::bigint;
		create or replace function pgxlock_key(p_space text, p_name text) returns bigint language sql stable parallel safe return pgxlock_own_key(false, '')`)
	d.do("select acquire_lock('held', 'A'), acquire_lock('late', 'A'), acquire_shared_lock('shared', 'A')")
	d.expire("late")

	// The transaction that acquires holds the guard and the pin of every lock, because all keys are equal.
	acquiring := d.begin(readCommitted)
	acquiring.want("acquire_lock('a', 'A')", "true")
	busy := map[string]string{
		"acquire_lock('b', 'B')":    "false",
		"acquire_lock('late', 'B')": "false",
		"(select tokens[1] is not null from pgxlock_acquire_batch('{b}', '{B}', '{60000}', '{null}', '{null}'))": "false",
		"acquire_shared_lock('b', 'B') is true":            "false",
		"acquire_permit('jobs', 'B', 1)":                   "NULL",
		"release_lock('held', 'A')":                        "55P03",
		"release_shared_lock('shared', 'A')":               "55P03",
		"pgxlock_release_batch('{held}', '{A}', '{null}')": "s",
		"reap_expired_locks('0')":                          "0",
	}
	for call, want := range busy {
		d.want(call, want)
	}
	for _, fence := range []string{"assert_lock_held('held', 'A')", "assert_shared_lock_held('shared', 'A')"} {
		d.want(fence, "LK001")
	}
	d.want("extend_lock('held', 'A')", "true") // needs no key
	acquiring.commit()

	// Fences exclude who would acquire or release, and not each other.
	one, two := d.begin(readCommitted), d.begin(readCommitted)
	one.want("assert_lock_held('held', 'A') > 0", "true")
	two.want("assert_lock_held('a', 'A') > 0", "true")
	two.want("assert_shared_lock_held('shared', 'A') > 0", "true")
	for call, want := range busy {
		d.want(call, want)
	}
	one.commit()
	d.want("acquire_lock('b', 'B')", "false")
	two.commit()
	d.want("reap_expired_locks('0')", "1")
	d.want("(select count(distinct token) from pgxlock_acquire_batch('{b,c,jobs#1}', '{B,B,B}', '{60000,60000,60000}', '{null,null,null}', '{null,null,null}'), unnest(tokens) token)", "3")
	d.want("release_lock('held', 'A')", "true")
	d.want("release_shared_lock('shared', 'A')", "true")

	// A session seems to live while another one has its key: its fence passes if nobody took the lock
	// over, and keeps the others out.
	h := d.holder()
	token := h.lock(1)
	d.want("pgxlock_advisory_batch('{0}', '{2}', 7)", "55000")
	h.end()
	next := d.holder()
	fenced := d.begin(readCommitted)
	fenced.want(h.fence(1, token), fmt.Sprint(token))
	next.must(lock, 1, refused)
	fenced.rollback()
	if after := next.lock(1); after <= token {
		t.Errorf("token %d after %d", after, token)
	}
	d.want(h.fence(1, token), "LK001")
	next.end()

	// And the ticket of a dead process counts.
	dead := d.process()
	dead.queue(0, "k")
	dead.die()
	d.want("pgxlock_waited_for('{0}', '{k}')", "{f}")
	living := d.process()
	d.want("pgxlock_waited_for('{0}', '{k}')", "{t}")
	d.want("acquire_lock('k', 'A')", "true") // who does not queue passes it
	living.die()
	d.want("pgxlock_waited_for('{0}', '{k}')", "{f}")
}

// Advisory locks of a program, whatever their names, do not disturb a lease: its name itself, by
// SHA-256 or by the server's hash functions, and names made of the words that we use inside.
func TestAdvisoryLocksOfUsersDoNotDisturbLeases(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	user := d.connect()
	for _, name := range []string{
		"order:42", "guard:order:42", "pin:order:42", "dl.guard:order:42", "dl.pin:order:42", "guardorder:42", "pinorder:42",
		"guard order:42", "pin order:42", "guard/order:42", "pin/order:42", "guard.order:42", "pin.order:42", "migrate:public",
	} {
		user.do("select pg_advisory_lock(advisory_lock_key(" + quote(name) + "))")
	}
	user.do("select pg_advisory_lock(hashtextextended('order:42', seed)), pg_advisory_lock(hashtext('order:42')) from generate_series(0, 9) seed")
	d.want("acquire_lock('order:42', 'A')", "true")
	writer := d.begin(readCommitted)
	writer.want("assert_lock_held('order:42', 'A') > 0", "true")
	writer.commit()
	d.expire("order:42")
	d.want("acquire_lock('order:42', 'B')", "true")
	d.want("release_lock('order:42', 'B')", "true")

	// The other way round: an open acquire and a fence hold no key of a name.
	d.begin(readCommitted).do("select acquire_lock('order:43', 'A'), assert_lock_held('order:43', 'A')")
	user.want("pg_try_advisory_lock(advisory_lock_key('order:43'))", "true")
}

func TestTwoSchemasOfOneDatabaseDoNotDisturbEachOther(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	for _, schema := range []string{"one", "two"} {
		if err := migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: schema}); err != nil {
			t.Fatal(err)
		}
	}
	d := open(t, db.URL)
	// Uncommitted in one, with its guard and its pin, free in the other.
	first := d.begin(readCommitted)
	first.want("one.acquire_lock('k', 'A')", "true")
	d.want("two.acquire_lock('k', 'B')", "true")
	d.want("one.acquire_lock('k', 'B')", "false")
	first.commit()
	first.begin(readCommitted)
	first.want("one.assert_lock_held('k', 'A') > 0", "true")
	d.want("two.release_lock('k', 'B')", "true")
	d.want("one.release_lock('k', 'A')", "55P03")
}
