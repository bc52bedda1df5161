package main

import (
	"regexp"
	"strings"

	"github.com/spf13/pflag"
)

// The package pgxlock gives its advice to programs. This file says it in the words of the
// command line.

// A hint is what the package says, and what a command says instead that has the flags which
// are mentioned there.
type hint struct{ program, command string }

// advices are in the order in which they are looked for: a longer one comes before its parts.
var advices = []hint{
	{"run migrations.Up or pgxlock migrate up", "run pgxlock migrate up"},
	{"Run migrations.Up, or pgxlock migrate up", "Run pgxlock migrate up"},
	{"run migrations.Up", "run pgxlock migrate up"},
	{"run Up (pgxlock migrate up)", "run pgxlock migrate up"},
	{"(doctor.Config.Schema,", "(with"},
	{"(Config.Schema)", "(--schema)"},
	{"LeaseConfig.Schema", "--schema"},
	{"AdvisoryConfig.Schema", "--schema"},
	{"monitor.Config.Schema", "--schema"},
	{"once.Config.Schema", "--schema"},
	{"monitor.Config.Names", "--name"},
	{"SET ROLE in the pool's AfterConnect", "name it in the connection string (?role=...)"},
	{"LeaseConfig.TTL", "--ttl"},
	{"connect to the server itself, set AdvisoryConfig.SessionPooler if the pooler is in session mode, or use NewLeaseLocker", "connect to the server itself, or leave out --kind advisory"},
	{"a setting that AdvisoryConfig.TTL needs; a negative TTL does without", "a setting that --ttl needs; leave out --kind advisory"},
	{"a negative AdvisoryConfig.TTL asks for none", "leave out --kind advisory"},
	{"pgxlock migrate down --force, or SET pgxlock.force = on before the file", "add --force"},
	{"Stop their holders", "stop their holders (pgxlock ls shows them)"},
	{"; use NewLeaseLocker:", "; leave out --kind advisory:"},
}

// arguments are what the functions call what the command line gave them.
var arguments = []hint{
	{"p_lock_name", "the key"},
	{"p_holder_id", "--holder"},
	{"p_ttl (or p_ttl_seconds)", "--ttl"},
	{"p_metadata", "--metadata"},
	{"p_fencing_token", "--token"},
	{"p_reason", "--reason"},
}

// inFlags says in a text what the hints say, for a command that has these flags.
func inFlags(flags *pflag.FlagSet, hints []hint, text string) string {
	for _, h := range hints {
		if has(flags, h.command) {
			text = strings.ReplaceAll(text, h.program, h.command)
		}
	}
	if schema := flags.Lookup("schema"); schema != nil && schema.Changed { // else it would be another one that is mended
		text = mending.ReplaceAllStringFunc(text, func(command string) string {
			bare, _, _ := strings.Cut(command, " --schema ")
			return bare + " --schema " + shellQuote(schema.Value.String())
		})
	}
	return text
}

// mending is a command for the schema that an error is about.
var mending = regexp.MustCompile(`\bpgxlock migrate (up|repair)\b( --schema \S+)?`)

// A remediedError says what to do about it, on a command that has the flags of the remedy.
type remediedError struct {
	error
	remedy string
}

func (e *remediedError) Unwrap() error { return e.error }

// mention is a flag in a text.
var mention = regexp.MustCompile(`--([a-z][a-z-]*)`)

// has reports whether all flags that a text mentions are there.
func has(flags *pflag.FlagSet, text string) bool {
	for _, flag := range mention.FindAllStringSubmatch(text, -1) {
		if flags.Lookup(flag[1]) == nil {
			return false
		}
	}
	return true
}
