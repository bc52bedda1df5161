package main

import (
	"fmt"
	"strings"
	"testing"
)

func TestKeysAndHoldersAreCompletedByWhatIsHeld(t *testing.T) {
	t.Parallel()
	db := withLeases(t)
	db.Exec(t, `select acquire_shared_lock('read', 'pod-5'), acquire_shared_lock('read', 'pod-6'), acquire_lock(E'order:\n3', 'pod-7')`)
	db.Exec(t, `select acquire_lock(k, '-p') from unnest('{flag,bad$(x)a,bad$(x)b,bad`+"`x`"+`,bad x,bad;x,bad|x,bad>x,bad!x,bad\\x,bad*,bad~}'::text[]) k`)
	_, pid := session(t, db, "set application_name = 'psql'; select pg_advisory_lock(42)")
	db.Exec(t, "select start_run('nightly', interval '1 day'), start_run('bad$(x)', interval '1 day')")
	const none = ":4\n"
	for line, want := range map[string]string{
		"evict|ord":                      "order:1\tpod-1\norder:2\tpod-2\n" + none,
		"evict|re":                       "read\tpod-5\n" + none,
		"ls|--prefix|im":                 "import\tpod-3\n" + none,
		"step-down|im":                   none, // expired
		"evict|im":                       none,
		"evict|#42|--pid|":               fmt.Sprintf("%d\tpsql:%[1]d\n", pid) + none,
		"evict|order:1|--pid|":           none,
		"runs|forget|--schema|public|":   "nightly\trunning\n:36\n",
		"run|order:1|":                   ":0\n", // files, for the command
		"evict|order:2|--holder|":        "pod-2\torder:2\n" + none,
		"release|--holder|pod-4":         "pod-4\told\n" + none,
		"ls|--prefix|order:2":            "order:2\tpod-2\n" + none,
		"evict|bad":                      none, // bash inserts unquoted how several begin, and runs it at the next tab
		"evict|flag|--holder|":           none, // -p would be a flag
		"evict|--schema|elsewhere|order": none,
		"ls|":                            none,
	} {
		words := strings.Split(line, "|")
		r := execute(t, nil, append([]string{"__complete", words[0], "--database-url", db.URL}, words[1:]...)...)
		if r.code != exitOK || r.stdout != want {
			t.Errorf("%s: exit code %d, %q, want %q", line, r.code, r.stdout, want)
		}
	}
	r := execute(t, nil, "__complete", "evict", "--database-url", "postgres://nobody@127.0.0.1:1/nowhere", "")
	if r.code != exitOK || r.stdout != none || strings.Count(r.stderr, "\n") != 1 { // that of cobra
		t.Errorf("without a server: %+v", r)
	}
}

// In the help backquotes mark the name of a value.
func TestCompletionDescribesFlagsWithoutBackquotes(t *testing.T) {
	t.Parallel()
	described := 0
	for _, cmd := range listed(newRoot()) {
		r := execute(t, nil, append(append([]string{"__complete"}, strings.Fields(cmd.CommandPath())[1:]...), "--")...)
		if r.code != exitOK || strings.Contains(r.stdout, "`") {
			t.Errorf("%s: %+v", cmd.CommandPath(), r)
		}
		described += strings.Count(r.stdout, "\tconnection string (default $PGXLOCK_DATABASE_URL")
	}
	if described < 15 {
		t.Errorf("%d commands describe --database-url", described)
	}
}

func TestUnknownShellIsRefusedWithThoseThatAreKnown(t *testing.T) {
	t.Parallel()
	execute(t, nil, "completion", "tcsh").want(t, exitUsage, "", `unknown command "tcsh" for "pgxlock completion"; use bash, fish, powershell, zsh`)
	execute(t, nil, "completion").want(t, exitUsage, "", `"pgxlock completion" needs a command: bash, fish, powershell, zsh`)
	execute(t, nil, "completion", "bash").want(t, exitOK, "__start_pgxlock", "")
}
