package sqltest_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io/fs"
	"strconv"
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
		t.Run(encoding, func(t *testing.T) {
			d := installEncoded(t, server, encoding)
			d.want("getdatabaseencoding()", encoding)
			d.want("advisory_lock_key('invoice:42')", "6688477336110245193")
			d.want("advisory_lock_key("+eAcute+")", "5375421630974772051")
			d.want("advisory_lock_key(NULL)", "NULL")
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

// The keys that pgxlock locks for itself contain a zero byte, which no name can
// contain, and the table, which another installation does not share.
func TestInternalKeysAreWhatNoNameCanHash(t *testing.T) {
	t.Parallel()
	d := install(t)
	oid, err := strconv.ParseUint(d.get("'distributed_locks'::regclass::oid"), 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	for _, space := range []string{"guard", "pin"} {
		for _, lock := range []string{"order:42", "é"} {
			text := append([]byte("\x00"+space+"\x00"), binary.BigEndian.AppendUint32(nil, uint32(oid))...)
			hash := sha256.Sum256(append(text, lock...))
			want := int64(binary.BigEndian.Uint64(hash[:8]))
			d.want(fmt.Sprintf("pgxlock_key(%s, %s)", quote(space), quote(lock)), fmt.Sprint(want))
		}
	}
}

// Advisory locks of a program, whatever their names, do not disturb a lease:
// its name itself, and names made of the words that we use inside.
func TestAdvisoryLocksOfUsersDoNotDisturbLeases(t *testing.T) {
	t.Parallel()
	d := install(t)
	user := d.connect()
	for _, name := range []string{
		"order:42", "guard:order:42", "pin:order:42", "dl.guard:order:42", "dl.pin:order:42", "guardorder:42", "pinorder:42",
		"guard order:42", "pin order:42", "guard/order:42", "pin/order:42", "guard.order:42", "pin.order:42", "migrate:public",
	} {
		user.do("select pg_advisory_lock(advisory_lock_key(" + quote(name) + "))")
	}
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
