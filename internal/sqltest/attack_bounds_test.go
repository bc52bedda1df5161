// Attacks by a role of the kind application that passes as much as an argument can hold: what is
// stored is read by every Monitor, and some of it by every other caller.

package sqltest_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	statements "github.com/pgxlock/pgxlock/sql"
)

// Arrays that are longer than a batch of any Locker.
const (
	names   = "array_fill('k'::text, '{10001}')"
	numbers = "array_fill(1, '{10001}')"
	bigs    = "array_fill(1::bigint, '{10001}')"
)

// Intervals whose months and days have opposite signs: as they compare, with months of 30 days, they
// are one day and 97 years, and as they are added 1,200 years ago and 1,300 years ahead.
const (
	longAgo  = "interval '-1000000 mons 30000001 days'"
	farAhead = "interval '1000000 mons -29965000 days'"
)

// oversized are calls of what an application may call, each with one argument that is too large, and
// what the error names. A function without such a call keeps nothing of its arguments, or says why.
var oversized = map[string][]struct{ argument, call string }{
	"acquire_lock": {
		{"p_lock_name", "acquire_lock(" + tooLong + ", 'A')"}, {"p_holder_id", "acquire_lock('k', " + tooLong + ")"}, {"p_metadata", "acquire_lock('k', 'A', 30, " + tooBig + ")"},
	},
	"acquire_in_turn": {
		{"p_lock_name", "(acquire_in_turn(" + tooLong + ", 'A')).acquired"},
		{"p_holder_id", "(acquire_in_turn('k', " + tooLong + ")).acquired"},
		{"p_ttl", "(acquire_in_turn('k', 'A', 0)).acquired"},
		{"p_ticket", "(acquire_in_turn('k', 'A', 30, -1)).acquired"},
		{"p_metadata", "(acquire_in_turn('k', 'A', 30, null, " + tooBig + ")).acquired"},
	},
	"acquire_shared_in_turn": {
		{"p_lock_name", "(acquire_shared_in_turn(" + tooLong + ", 'A')).acquired"},
		{"p_holder_id", "(acquire_shared_in_turn('k', " + tooLong + ")).acquired"},
		{"p_ttl", "(acquire_shared_in_turn('k', 'A', 0)).acquired"},
		{"p_ticket", "(acquire_shared_in_turn('k', 'A', 30, -1)).acquired"},
		{"p_metadata", "(acquire_shared_in_turn('k', 'A', 30, null, " + tooBig + ")).acquired"},
	},
	"acquire_permits_in_turn": {
		{"p_lock_name", "(acquire_permits_in_turn(" + tooLong + ", 'A', 1)).acquired"},
		{"p_lock_name", "(acquire_permits_in_turn(repeat('k', 254), 'A', 1)).acquired"},
		{"p_holder_id", "(acquire_permits_in_turn('k', " + tooLong + ", 1)).acquired"},
		{"p_permits", "(acquire_permits_in_turn('k', 'A', 10001)).acquired"},
		{"p_wanted", "(acquire_permits_in_turn('k', 'A', 300, 257)).acquired"},
		{"p_wanted", "(acquire_permits_in_turn('k', 'A', 2, 3)).acquired"},
		{"p_ttl", "(acquire_permits_in_turn('k', 'A', 1, 1, 0)).acquired"},
		{"p_ticket", "(acquire_permits_in_turn('k', 'A', 1, 1, 30, -1)).acquired"},
		{"p_metadata", "(acquire_permits_in_turn('k', 'A', 1, 1, 30, null, " + tooBig + ")).acquired"},
	},
	"leave_queue": {{"p_lock_name", "leave_queue(" + tooLong + ", 'A')"}, {"p_holder_id", "leave_queue('k', " + tooLong + ")"}},
	"try_acquire_lock": {
		{"p_ttl", "(try_acquire_lock('k', 'A', " + longAgo + ")).acquired"},
		{"p_ttl", "(try_acquire_lock('k', 'A', " + farAhead + ")).acquired"},
		{"p_lock_name", "(try_acquire_lock(" + tooLong + ", 'A')).acquired"},
		{"p_holder_id", "(try_acquire_lock('k', " + tooLong + ")).acquired"},
		{"p_ttl", "(try_acquire_lock('k', 'A', '101 years')).acquired"},
		{"p_metadata", "(try_acquire_lock('k', 'A', '1 s', " + tooBig + ")).acquired"},
	},
	"acquire_shared_lock": {
		{"p_lock_name", "acquire_shared_lock(" + tooLong + ", 'A')"},
		{"p_holder_id", "acquire_shared_lock('k', " + tooLong + ")"},
		{"p_metadata", "acquire_shared_lock('k', 'A', 30, " + tooBig + ")"},
	},
	"try_acquire_shared_lock": {
		{"p_ttl", "(try_acquire_shared_lock('k', 'A', " + longAgo + ")).acquired"},
		{"p_ttl", "(try_acquire_shared_lock('k', 'A', " + farAhead + ")).acquired"},
		{"p_lock_name", "(try_acquire_shared_lock(" + tooLong + ", 'A')).acquired"},
		{"p_holder_id", "(try_acquire_shared_lock('k', " + tooLong + ")).acquired"},
		{"p_ttl", "(try_acquire_shared_lock('k', 'A', '101 years')).acquired"},
		{"p_metadata", "(try_acquire_shared_lock('k', 'A', '1 s', " + tooBig + ")).acquired"},
	},
	"renew_lock":              {{"p_ttl", "renew_lock('k', 'A', 1, " + farAhead + ")"}, {"p_lock_name", "renew_lock(" + tooLong + ", 'A', 1)"}, {"p_holder_id", "renew_lock('k', " + tooLong + ", 1)"}, {"p_ttl", "renew_lock('k', 'A', 1, '101 years')"}},
	"extend_lock":             {{"p_lock_name", "extend_lock(" + tooLong + ", 'A')"}, {"p_holder_id", "extend_lock('k', " + tooLong + ")"}},
	"extend_shared_lock":      {{"p_lock_name", "extend_shared_lock(" + tooLong + ", 'A')"}, {"p_holder_id", "extend_shared_lock('k', " + tooLong + ")"}},
	"release_lock":            {{"p_lock_name", "release_lock(" + tooLong + ", 'A')"}, {"p_holder_id", "release_lock('k', " + tooLong + ")"}},
	"release_lock_fenced":     {{"p_lock_name", "release_lock_fenced(" + tooLong + ", 'A', 1)"}, {"p_holder_id", "release_lock_fenced('k', " + tooLong + ", 1)"}},
	"release_shared_lock":     {{"p_lock_name", "release_shared_lock(" + tooLong + ", 'A')"}, {"p_holder_id", "release_shared_lock('k', " + tooLong + ")"}},
	"release_all_locks":       {{"p_holder_id", "release_all_locks(" + tooLong + ")"}},
	"assert_lock_held":        {{"p_lock_name", "assert_lock_held(" + tooLong + ", 'A')"}, {"p_holder_id", "assert_lock_held('k', " + tooLong + ")"}},
	"assert_shared_lock_held": {{"p_lock_name", "assert_shared_lock_held(" + tooLong + ", 'A')"}, {"p_holder_id", "assert_shared_lock_held('k', " + tooLong + ")"}},
	"lock_tx":                 {{"p_name", "lock_tx(" + tooLong + ")"}},
	"claim_once":              {{"p_retention", "claim_once('k', null, " + longAgo + ")"}, {"p_retention", "claim_once('k', null, " + farAhead + ")"}, {"p_key", "claim_once(" + tooLong + ")"}, {"p_retention", "claim_once('k', null, '101 years')"}},
	"claim_request": {
		{"p_retention", "(claim_request('k', 'f', null, " + farAhead + ")).outcome"},
		{"p_key", "(claim_request(" + tooLong + ", 'f')).outcome"},
		{"p_fingerprint", "(claim_request('k', " + tooLong + ")).outcome"},
		{"p_retention", "(claim_request('k', 'f', null, '101 years')).outcome"},
	},
	"answer_request": {
		{"p_key", "answer_request(" + tooLong + ", 'f', '') is null"},
		{"p_fingerprint", "answer_request('k', " + tooLong + ", '') is null"},
		{"p_answer", "answer_request('k', 'f', decode(repeat('00', 1048577), 'hex')) is null"},
	},
	"acquire_permit": {
		{"p_lock_name", "acquire_permit(" + tooLong + ", 'A', 1)"},
		{"p_holder_id", "acquire_permit('k', " + tooLong + ", 1)"},
		{"p_permits", "acquire_permit('k', 'A', 10001)"},
		{"p_metadata", "acquire_permit('k', 'A', 1, 30, " + tooBig + ")"},
	},
	"pgxlock_acquire_one": {
		{"p_lock_name", "(pgxlock_acquire_one(" + tooLong + ", 'A', 1000, null, null)).token"},
		{"p_holder_id", "(pgxlock_acquire_one('k', " + tooLong + ", 1000, null, null)).token"},
		{"p_ttl", "(pgxlock_acquire_one('k', 'A', 3110400000001, null, null)).token"},
		{"p_metadata", "(pgxlock_acquire_one('k', 'A', 1000, (" + tooBig + ")::text, null)).token"},
	},
	"pgxlock_acquire_batch": {
		{"p_names", "(pgxlock_acquire_batch('{new}', '[0:1]={A,*shared}', '{1000}', '{null}', '{null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('{new}', '{A}', '[0:1]={1000,200000000000000}', '{null}', '{null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('{new}', '{{A}}', '{1000}', '{null}', '{null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('[0:1]={k,l}', '{A,*shared}', '{1000,1000}', '{null,null}', '{null,null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('{k,l}', '[0:1]={A,*shared}', '{1000,1000}', '{null,null}', '{null,null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('{k,l}', '{A,*shared}', '[0:1]={1000,1000}', '{null,null}', '{null,null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('{k,l}', '{A,*shared}', '{1000,1000}', '[0:1]={null,null}', '{null,null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch('{k,l}', '{A,*shared}', '{1000,1000}', '{null,null}', '[0:1]={null,null}')).tokens"},
		{"p_names", "(pgxlock_acquire_batch(" + names + ", " + names + ", " + bigs + ", " + names + ", " + bigs + ")).tokens"},
		{"p_holder_id", "(pgxlock_acquire_batch('{k}', array[" + tooLong + "], '{1000}', '{null}', '{null}')).tokens"},
	},
	"pgxlock_try_in_turn": {
		{"p_names", "(select count(*) from pgxlock_try_in_turn('[0:1]={k,l}', '{A,*shared}', '{1000,1000}', '{null,null}', '{null,null}', false))"},
		{"p_names", "(select count(*) from pgxlock_try_in_turn('{k,l}', '[0:1]={A,*shared}', '{1000,1000}', '{null,null}', '{null,null}', false))"},
		{"p_names", "(select count(*) from pgxlock_try_in_turn('{k,l}', '{A,*shared}', '[0:1]={1000,1000}', '{null,null}', '{null,null}', false))"},
		{"p_names", "(select count(*) from pgxlock_try_in_turn('{k,l}', '{A,*shared}', '{1000,1000}', '[0:1]={null,null}', '{null,null}', false))"},
		{"p_names", "(select count(*) from pgxlock_try_in_turn('{k,l}', '{A,*shared}', '{1000,1000}', '{null,null}', '[0:1]={null,null}', false))"},
		{"p_names", "(select count(*) from pgxlock_try_in_turn(" + names + ", " + names + ", " + bigs + ", " + names + ", " + bigs + ", true))"},
		{"p_holder_id", "(select count(*) from pgxlock_try_in_turn('{k}', array[" + tooLong + "], '{1000}', '{null}', '{null}', true))"},
	},
	"pgxlock_permit_batch": {
		{"p_names", "(select count(*) from pgxlock_permit_batch('[0:1]={k,l}', '{1,1}', '{A,B}', '{1000,1000}', '{null,null}', '{null,null}'))"},
		{"p_names", "(select count(*) from pgxlock_permit_batch('{k,l}', '[0:1]={1,1}', '{A,B}', '{1000,1000}', '{null,null}', '{null,null}'))"},
		{"p_names", "(select count(*) from pgxlock_permit_batch('{k,l}', '{1,1}', '[0:1]={A,B}', '{1000,1000}', '{null,null}', '{null,null}'))"},
		{"p_names", "(select count(*) from pgxlock_permit_batch('{k,l}', '{1,1}', '{A,B}', '[0:1]={1000,1000}', '{null,null}', '{null,null}'))"},
		{"p_names", "(select count(*) from pgxlock_permit_batch('{k,l}', '{1,1}', '{A,B}', '{1000,1000}', '[0:1]={null,null}', '{null,null}'))"},
		{"p_names", "(select count(*) from pgxlock_permit_batch('{k,l}', '{1,1}', '{A,B}', '{1000,1000}', '{null,null}', '[0:1]={null,null}'))"},
		{"p_names", "(select count(*) from pgxlock_permit_batch(" + names + ", " + numbers + ", " + names + ", " + bigs + ", " + names + ", " + bigs + "))"},
		{"p_holder_id", "(select count(*) from pgxlock_permit_batch('{k}', '{1}', array[" + tooLong + "], '{1000}', '{null}', '{null}'))"},
	},
	"pgxlock_renew_batch": {
		{"p_names", "(select count(*) from pgxlock_renew_batch(" + names + ", '{A}', '{1}', '{1}'))"},
		{"p_holders", "(select count(*) from pgxlock_renew_batch('{k}', " + names + ", '{1}', '{1}'))"},
		{"p_tokens", "(select count(*) from pgxlock_renew_batch('{k}', '{A}', " + bigs + ", '{1}'))"},
		{"p_ttls", "(select count(*) from pgxlock_renew_batch('{k}', '{A}', '{1}', " + bigs + "))"},
	},
	"pgxlock_renew_shares_batch":   {{"p_names", "(select count(*) from pgxlock_renew_shares_batch(" + names + ", '{A}', '{1}', '{1}'))"}},
	"pgxlock_release_batch":        {{"p_names", "pgxlock_release_batch(" + names + ", " + names + ", " + bigs + ")"}},
	"pgxlock_release_shares_batch": {{"p_names", "(select count(*) from pgxlock_release_shares_batch(" + names + ", '{A}', '{1}'))"}},
	"pgxlock_advisory_batch":       {{"p_ops", "pgxlock_advisory_batch(" + numbers + ", " + bigs + ", 1)"}},
	"pgxlock_publish_batch": {
		{"p_names", publishing(map[string]string{"kinds": numbers, "names": names, "tickets": bigs, "waiters": numbers, "holds": names})},
		{"p_owner", publishing(map[string]string{"owner": tooLong})},
		{"p_live_ms", publishing(map[string]string{"live": "60001"})},
		{"p_protocol", publishing(map[string]string{"protocol": "0"})},
		{"a name of 1 to 255", publishing(map[string]string{"names": "array[" + tooLong + "]"})},
		{"waiters", publishing(map[string]string{"waiters": "'{1000001}'"})},
		{"p_holds", publishing(map[string]string{"holds": "array[to_json(array_fill('h'::text, '{1001}'))::text]"})},
		{"p_holds", publishing(map[string]string{"holds": "array[to_json(array[repeat('h', 65536)])::text]"})},
		{"p_holds", publishing(map[string]string{"holds": "'{[1e131000]}'"})}, // eight bytes
	},
	"pgxlock_withdraw_batch": {{"p_names", "pgxlock_withdraw_batch(" + numbers + ", " + names + ", " + bigs + ") is null"}},
	"pgxlock_refused_batch":  {{"p_names", "pgxlock_refused_batch(" + numbers + ", " + names + ", " + bigs + ") is null"}},
	"pgxlock_wake_batch":     {{"p_names", "(select count(*) from pgxlock_wake_batch(" + numbers + ", " + names + ", " + bigs + "))"}},
	"pgxlock_waited_for":     {{"p_names", "pgxlock_waited_for(" + numbers + ", " + names + ")"}},
	"pgxlock_notify_holders": {{"p_ids", "pgxlock_notify_holders(" + numbers + ", " + bigs + ")"}},
	"pgxlock_step_downs":     {{"p_names", "(select count(*) from pgxlock_step_downs(" + numbers + ", " + names + ", " + names + "))"}},
	"pgxlock_evicted":        {{"p_names", "(select count(*) from pgxlock_evicted(" + numbers + ", " + names + ", " + names + ", " + bigs + "))"}},
	"pgxlock_publish_names":  {{"p_names", "pgxlock_publish_names(" + names + ") is null"}, {"p_names", "pgxlock_publish_names(array[" + tooLong + "]) is null"}, {"p_names", "pgxlock_publish_names('{k}', array[" + tooLong + "]) is null"}},
	"start_run":              {{"p_key", "start_run(" + tooLong + ", '1 day')"}, {"p_period", "start_run('k', '36501 days')"}, {"p_time_zone", "start_run('k', '1 day', '0', " + tooLong + ")"}, {"p_first", "start_run('k', '1 day', '0', 'UTC', 'later')"}},
	"list_runs":              {{"p_key", "(select count(*) from list_runs(" + tooLong + "))"}, {"p_limit", "(select count(*) from list_runs(null, 10001))"}},
	"start_run_at":           {{"p_key", "start_run_at(" + tooLong + ", now())"}, {"slot", "start_run_at('k', now() + interval '8 days')"}},
	"finish_run":             {{"p_key", "finish_run(" + tooLong + ", now())"}},
	"pgxlock_due_runs":       {{"p_key", "(select count(*) from pgxlock_due_runs(" + tooLong + ", '1 h', '0', 'UTC', 0, false))"}, {"p_missed", "(select count(*) from pgxlock_due_runs('k', '1 h', '0', 'UTC', 1001, false))"}, {"p_first", "(select count(*) from pgxlock_due_runs('k', '1 h', '0', 'UTC', 0, false, 'later'))"}},
	"pgxlock_start_run": {
		{"p_keep", "(pgxlock_start_run('k', now(), null, null, null, " + farAhead + ", 'A', null)).attempt"},
		{"slot", "(pgxlock_start_run('k', now() + interval '2 days', '1 day', '0', 'UTC', '1 day', 'A', null, 'next')).attempt"},
		{"p_time_zone", "(pgxlock_start_run('k', now(), '1 day', '0', " + tooLong + ", '1 day', 'A', null)).attempt"},
		{"p_first", "(pgxlock_start_run('k', now(), null, null, null, '1 day', 'A', null, 'later')).attempt"},
		{"p_key", "(pgxlock_start_run(" + tooLong + ", now(), null, null, null, '1 day', 'A', null)).attempt"},
		{"p_holder", "(pgxlock_start_run('k', now(), null, null, null, '1 day', " + tooLong + ", null)).attempt"},
		{"p_keep", "(pgxlock_start_run('k', now(), null, null, null, '101 years', 'A', null)).attempt"},
		{"p_lock_name", "(pgxlock_start_run('k', now(), null, null, null, '1 day', 'A', " + tooLong + ")).attempt"},
	},
	"pgxlock_finish_run": {{"p_key", "pgxlock_finish_run(" + tooLong + ", now(), 'A', 'failed', '')"}},
	"allow_rate":         {{"p_key", "allow_rate(" + tooLong + ", 1, 1)"}, {"p_burst", "allow_rate('k', 1e-9, 4)"}},
	"reserve_rate":       {{"p_key", "(reserve_rate(" + tooLong + ", 1, 1)).granted"}, {"p_max_wait", "(reserve_rate('k', 1, 1, 1, '101 years')).granted"}},
	"pgxlock_limit_batch": {
		{"p_keys", "(select count(*) from pgxlock_limit_batch(1000, 1, " + names + ", " + numbers + ", " + bigs + ", " + bigs + "))"},
		{"a key of 1 to 255", "(select count(*) from pgxlock_limit_batch(1000, 1, array[" + tooLong + "], '{1}', '{0}', '{null}'))"},
	},
	"ask_to_step_down":         {{"p_lock_name", "ask_to_step_down(" + tooLong + ")"}, {"p_reason", "ask_to_step_down('k', repeat('x', 1001))"}},
	"pgxlock_ask_to_step_down": {{"a name of 1 to 255", "pgxlock_ask_to_step_down(0, " + tooLong + ", '', '')"}, {"1000 bytes", "pgxlock_ask_to_step_down(0, 'k', repeat('x', 1001), '')"}},
	"reap_expired_locks":       {{"p_grace", "reap_expired_locks(" + longAgo + ")"}, {"p_limit", "reap_expired_locks('1 h', 10001)"}},
	"pgxlock_reap_advisory":    {{"p_limit", "pgxlock_reap_advisory(10001)"}},
	"pgxlock_reap_waiters":     {{"p_limit", "pgxlock_reap_waiters(10001)"}},
	"pgxlock_reap_shares":      {{"p_grace", "pgxlock_reap_shares(" + longAgo + ")"}, {"p_limit", "pgxlock_reap_shares('1 h', 10001)"}},
	"pgxlock_reap_limits":      {{"p_pages", "(pgxlock_reap_limits(0, 10001)).removed"}},

	"pgxlock_change_lease": {
		{"p_lock_name", "(pgxlock_change_lease(" + tooLong + ", 'A', 1, false, null, 1000, null)).outcome"},
		{"p_holder_id", "(pgxlock_change_lease('k', " + tooLong + ", 1, false, null, 1000, null)).outcome"},
		{"p_metadata", "(pgxlock_change_lease('k', 'A', 1, false, null, 1000, to_jsonb(repeat('m', 65537))::text)).outcome"},
	},
	"pgxlock_share_held": {
		{"p_lock_name", "pgxlock_share_held(" + tooLong + ", 'A', 1, 'B', 1000)"},
		{"p_holder_id", "pgxlock_share_held('k', " + tooLong + ", 1, 'B', 1000)"},
		{"p_holder_id", "pgxlock_share_held('k', 'A', 1, " + tooLong + ", 1000)"},
	},

	"pgxlock_release_one":       nil, // looks the row up
	"wake_lock_waiter":          nil, // looks the row up
	"pgxlock_holders":           nil, // looks the row up
	"assert_advisory_lock_held": nil, // numbers
	"advisory_lock_key":         nil, // a hash
	"advisory_lock_key_in":      nil, // a hash
	"pgxlock_own_key":           nil, // a hash
	"pgxlock_waiter_key":        nil, // a hash
	"pgxlock_version":           nil,
}

// publishing is a call of pgxlock_publish_batch() that is fine but for these arguments.
func publishing(other map[string]string) string {
	arguments := map[string]string{"kinds": "'{0}'", "names": "'{k}'", "tickets": "'{null}'", "waiters": "'{1}'", "holds": "'{null}'", "client": "null", "owner": "'me'", "live": "1000", "protocol": "1"}
	for name, value := range other {
		arguments[name] = value
	}
	return fmt.Sprintf("(select count(*) from pgxlock_publish_batch(%[1]s, %[2]s, %[3]s::bigint[], %[4]s, %[5]s::text[], %[6]s, %[7]s, %[8]s, %[9]s))",
		arguments["kinds"], arguments["names"], arguments["tickets"], arguments["waiters"], arguments["holds"], arguments["client"], arguments["owner"], arguments["live"], arguments["protocol"])
}

func TestApplicationCannotPassMoreThanTheBounds(t *testing.T) {
	t.Parallel()
	d := install(t)
	app := d.as(d.harden("application")[0])
	for _, name := range strings.Fields(d.get("(select string_agg(distinct split_part(substr(object, 10), '(', 1), ' ') from pgxlock_rights() where hardened and 'application' = any(kinds))")) {
		if _, known := oversized[name]; !known {
			t.Errorf("%s can be called by applications, and no test passes it too much", name)
		}
	}
	for name, calls := range oversized {
		for _, c := range calls { // a number may have many more zeros than it is stored in bytes
			if strings.Contains(c.call, tooBig) {
				c.call = strings.ReplaceAll(c.call, tooBig, "jsonb '{\"n\": [1e65000]}'")
				calls = append(calls, c)
			}
		}
		for _, c := range calls {
			_, err := app.query(c.call)
			var refused *pgconn.PgError
			switch {
			case !errors.As(err, &refused) || refused.Code != "22023":
				t.Errorf("%s: got %v, want SQLSTATE 22023", c.call, err)
			case !strings.Contains(refused.Message, c.argument):
				t.Errorf("%s: the error names no %s: %s", name, c.argument, refused.Message)
			}
		}
	}
	for _, batch := range []string{
		"pgxlock_acquire_batch('{a,k}', '{A,A}', '{1000,1000}', '{null,1e65000}', '{null,null}')",
		"pgxlock_permit_batch('{a,k}', '{1,1}', '{A,A}', '{1000,1000}', '{null,1e65000}', '{null,null}')",
	} {
		app.want("(select count(*) from "+batch+")", "22023")
	}
	app.do("create temp table compressed as select to_jsonb(repeat('x', 65000)) as metadata")
	app.want("(select acquire_lock('long', 'A', 30, metadata) from compressed)", "true")
	d.want("(select count(*) from pgxlock_waiters)", "0")

	// What a ticket may say is published, and the error of a run is cut.
	app.want(publishing(map[string]string{
		"kinds": "array_fill(0, '{1000}')", "names": "array(select i::text from generate_series(1, 1000) i)", "tickets": "array_fill(null::bigint, '{1000}')",
		"waiters": "array_fill(1, '{1000}')", "holds": "array_fill(null::text, '{1000}')", "owner": "repeat('x', 255)", "live": "60000",
	}), "1000")
	app.want(publishing(map[string]string{"holds": "array[to_json(array_fill('h'::text, '{1000}'))::text]"}), "1")
	app.do("select start_run_at('k', now())")
	d.want("finish_run('k', (select slot from pgxlock_runs), repeat('x', 1000000))", "true")
	d.want("(select length(error) from pgxlock_runs)", "2000")
}

// Each kind of row that an application leaves behind has a call that removes it.
func TestAdministrationResetsWhatApplicationsLeft(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	roles := d.harden("application", "administration")
	app, ops := d.as(roles[0]), d.as(roles[1])
	app.do("select " + publishing(nil) + ", " + publishing(map[string]string{"kinds": "'{1}'", "names": "array[advisory_lock_key('k')::text]"}) + "," + publishing(map[string]string{"names": "'{other}'"}))
	app.do("select allow_rate('k', 1e-9, 3, 3), claim_once('k'), start_run('k', '1 day'), start_run_at('k', now()), acquire_lock('k', 'A'), ask_to_step_down('k')")
	app.want("allow_rate('k', 100, 10)", "false")
	for _, what := range []struct{ name, removed string }{{"waiters", "2"}, {"limit", "1"}, {"claim", "1"}, {"runs", "2"}, {"step_down", "1"}} {
		if got := app.outcome("reset_lock_state('" + what.name + "', 'k')"); got != "42501" {
			t.Errorf("an application resets %s: %s", what.name, got)
		}
		ops.want("reset_lock_state('"+what.name+"', 'k')", what.removed)
		ops.want("reset_lock_state('"+what.name+"', 'k')", "0")
	}
	app.want("allow_rate('k', 100, 10)", "true")
	app.want("claim_once('k')", "true")
	app.want("start_run('k', '1 day') is null", "false")
	d.want("(select string_agg(name, ' ') from pgxlock_waiters)", "other")
	for _, call := range []string{"reset_lock_state('lease', 'k')", "reset_lock_state(null, 'k')", "reset_lock_state('limit', " + tooLong + ")", "reset_lock_state('limit', null)"} {
		ops.want(call, "22023")
	}
}

// An application leaves more dead sessions and processes than the server has room for locks, and each
// is asked about by a lock.
func TestAdministrationReapsWhatManyDeadSessionsLeft(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := installAsIs(t)
	const dead = 60000
	d.do(fmt.Sprintf(`insert into pgxlock_advisory_locks (key_space, key_id, session, token, shared) select 1, 1, i, i, true from generate_series(1, %d) i;
		insert into pgxlock_waiters select 0, 'k', i, i, 'me', 1, now(), now() + '1 hour' from generate_series(1, %[1]d) i`, dead))
	for _, call := range []string{"pgxlock_reap_advisory(10000)", "pgxlock_reap_waiters(10000)"} {
		removed := 0
		for rounds := 0; removed < dead && rounds < 2*dead/1000; rounds++ {
			n, err := strconv.Atoi(d.get(call))
			if err != nil {
				t.Fatalf("%s: %v", call, err)
			}
			removed += n
		}
		if removed != dead {
			t.Errorf("%s removed %d, want %d", call, removed, dead)
		}
	}
}

// The holders of a lock are shown to each of its waiters, and an application says how many there are of both.
func TestWaitersShowAHundredHolders(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	app := d.as(d.harden("application")[0])
	app.want("(select count(*) from generate_series(1, 101) i where acquire_shared_lock('k', 'A' || i))", "101")
	app.want(publishing(nil), "1")
	d.want("(select cardinality(held_by) from lock_waiters)", "100")
}

// The doctor looks for the last run of each key, and an application says how many there are, and in which order.
func TestRunsOfAKeyAreNotComparedPairByPair(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	app := d.as(d.harden("application")[0])
	const runs = 1000
	app.want(fmt.Sprintf("(select count(*) from generate_series(1, %d) i where start_run_at('k', now() - interval '2 days' - i * interval '1 us'))", runs), fmt.Sprint(runs))
	d.do("analyze pgxlock_runs")
	if rows := d.reads(statements.DoctorRuns.Text()); rows > 20*runs {
		t.Errorf("the doctor reads %.0f rows of %d", rows, runs)
	}
}
