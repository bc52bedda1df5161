package sqltest_test

import (
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// stored tells how many leases there are after the outcome of a call.
func (d *database) stored(outcome string) string {
	d.t.Helper()
	if d.get("select count(*) from distributed_locks") == "0" {
		return outcome + ", nothing stored"
	}
	return outcome + ", stored"
}

var inputDefects = []defect{
	{
		name: "D08_a_name_that_is_too_long_leaks_under_another_name",
		seed: "false, stored; the name without the blanks: busy",
		ours: "22023, nothing stored; the name without the blanks: granted",
		run: func(d *database) string {
			first := d.stored(d.outcome("acquire_lock(repeat('x', 255) || '  ', 'A')"))
			return line(first, "the name without the blanks: "+words(d.outcome("acquire_lock(repeat('x', 255), 'B')")))
		},
	},
	{
		name: "D09_a_ttl_of_0_is_granted_and_NULL_is_released_in_silence",
		seed: "ttl 0: true, expired at once; name '': true; release of NULL: false",
		ours: "ttl 0: 22023; name '': 22023; release of NULL: 22023",
		run: func(d *database) string {
			ttl := d.outcome("acquire_lock('k', 'A', 0)")
			if d.get("select expires_at <= clock_timestamp() from distributed_locks") == "true" {
				ttl += ", expired at once"
			}
			return line("ttl 0: "+ttl, "name '': "+d.outcome("acquire_lock('', 'A')"),
				"release of NULL: "+d.outcome("release_lock(NULL, 'A')"))
		},
	},
	{
		name: "D10_metadata_is_neither_refreshed_nor_bounded",
		seed: `renewed with 2: {"v": 1}; NULL: NULL; 1 MB: true`,
		ours: `renewed with 2: {"v": 2}; NULL: {}; 1 MB: 22023`,
		run: func(d *database) string {
			metadata := func(lock string) string {
				return d.get("select metadata from distributed_locks where lock_name = " + quote(lock))
			}
			d.do(`select acquire_lock('k', 'A', 30, '{"v": 1}'), acquire_lock('null', 'A', 30, NULL)`)
			d.do(`select acquire_lock('k', 'A', 30, '{"v": 2}')`)
			return line("renewed with 2: "+metadata("k"), "NULL: "+metadata("null"),
				"1 MB: "+d.outcome("acquire_lock('big', 'A', 30, to_jsonb(repeat('x', 1048576)))"))
		},
	},
	{
		name: "D11_a_ttl_of_type_bigint_is_refused",
		seed: "bigint: 42883; the largest integer: true",
		ours: "bigint: 42883; the largest integer: true", // an overload would make other calls ambiguous
		run: func(d *database) string {
			return line("bigint: "+d.outcome("acquire_lock('k', 'A', 30::bigint)"),
				"the largest integer: "+d.outcome("acquire_lock('k', 'A', 2147483647)"))
		},
	},
	{
		name: "D18_the_answer_is_not_what_the_write_did",
		seed: "false, stored",
		ours: "22023, nothing stored",
		run: func(d *database) string {
			return d.stored(d.outcome("acquire_lock('k', repeat('h', 255) || '  ')"))
		},
	},
}

var holderDefects = []defect{
	{
		name: "D12_a_temporary_table_hijacks_the_functions",
		seed: "a second holder is granted",
		ours: "a second holder is told busy",
		run: func(d *database) string {
			a, b := d.sessions()
			b.do("select acquire_lock('k', 'B')")
			a.do("create temporary table distributed_locks (like distributed_locks including all)")
			if a.get("acquire_lock('k', 'A')") == "true" {
				return "a second holder is granted"
			}
			return "a second holder is told busy"
		},
	},
	{
		name: "D13_one_holder_id_is_one_holder_without_a_count",
		seed: "second acquire: granted; after one release others are granted",
		ours: "second acquire: granted; after one release others are granted", // kept; use a holder id per acquisition
		run: func(d *database) string {
			d.do("select acquire_lock('k', 'A')")
			second := words(d.get("acquire_lock('k', 'A')"))
			d.do("select release_lock('k', 'A')")
			return line("second acquire: "+second, "after one release others are "+words(d.get("acquire_lock('k', 'B')")))
		},
	},
	{
		name: "D17_a_role_that_may_write_the_table_can_forge_a_lease",
		seed: "forged",
		ours: "forged", // kept: access is the table's grants; take them away where that matters
		run: func(d *database) string {
			role := d.role()
			d.do("grant select, insert, update, delete on distributed_locks to " + role)
			d.do("select acquire_lock('k', 'A')")
			other := d.connect()
			other.do("set role " + role + "; update distributed_locks set holder_id = 'mallory'")
			if d.get("select holder_id from distributed_locks") == "mallory" {
				return "forged"
			}
			return "refused"
		},
	},
	{
		name: "D19_an_acquire_that_is_rolled_back_has_said_true",
		seed: "true; then others are granted",
		ours: "true; then others are granted", // inherent: documented
		run: func(d *database) string {
			a, b := d.sessions()
			a.do("begin; savepoint s")
			acquired := a.get("acquire_lock('k', 'A')")
			a.do("rollback to s")
			return line(acquired, "then others are "+words(b.get("acquire_lock('k', 'B')")))
		},
	},
	{
		name: "D20_a_call_in_WHERE_takes_more_than_LIMIT_returns",
		seed: "20 leases for 1 row",
		ours: "20 leases for 1 row", // inherent: documented, with LATERAL as the way to do it
		run: func(d *database) string {
			defer d.do("drop table jobs")
			d.do(`create table jobs as select generate_series(1, 20) as id;
				select id from jobs where acquire_lock('job:' || id, 'A') order by id desc limit 1`)
			return d.get("select count(*) from distributed_locks") + " leases for 1 row"
		},
	},
}

var serverDefects = []defect{
	{
		name: "D15_a_crash_loses_an_acknowledged_lease_when_the_role_commits_asynchronously",
		seed: "lost",
		ours: "still there",
		run: func(d *database) string {
			// The same functions, on a server that may crash.
			server := pgtest.Private(d.t, pgserver.Config{Settings: lazy})
			crashing := open(d.t, server.URL("postgres"))
			if d.get("to_regclass('pgxlock_epoch')") == "NULL" {
				crashing.do(seedSQL(d.t))
			} else {
				crashing = installOn(d.t, server)
			}
			crashing.do("checkpoint")
			crashing.do("set synchronous_commit = off")
			crashing.want("acquire_lock('k', 'A', 600)", "true")
			if crash(d.t, server).get("select count(*) from distributed_locks") == "0" {
				return "lost"
			}
			return "still there"
		},
	},
}
