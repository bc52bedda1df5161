package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/monitor"
)

// Exit codes, those of sysexits.h where it has one.
const (
	exitOK          = 0
	exitNotCurrent  = 1  // migrate status: not at the newest version
	exitNone        = 1  // ls --exit-code: no lock passes the filters
	exitUnsound     = 1  // doctor: it found an error
	exitNoLeader    = 1  // step-down: nobody holds the lock
	exitNotEvicted  = 1  // evict: the holder had it no longer, or the answer was no
	exitRunFailed   = 1  // once: the run of this period has failed, and is not started again
	exitNoRun       = 1  // runs forget: no such run is recorded
	exitUsage       = 64 // EX_USAGE
	exitUnavailable = 69 // EX_UNAVAILABLE
	exitInternal    = 70 // EX_SOFTWARE
	exitBusy        = 75 // EX_TEMPFAIL
	exitDenied      = 77 // EX_NOPERM: the user, the password, the database, a right
	exitLost        = 80 // a lock was not held any more
	exitNotRunnable = 126
	exitNotFound    = 127
	exitSignal      = 128
)

// exitCodes are the exit codes as help and docs/run.md list them.
var exitCodes = []struct{ code, meaning string }{
	{code(exitOK), "success"},
	{code(exitNone), "the answer is no: pgxlock migrate status found another version than the newest, pgxlock ls --exit-code no lock, " +
		"pgxlock doctor an error (with --strict, also a warning), pgxlock step-down no leader, pgxlock runs forget no run; pgxlock evict evicted nobody; " +
		"or pgxlock once found that the run of this period has failed, and is not started again"},
	{code(exitUsage), "wrong usage: correct the command line"},
	{code(exitUnavailable), "the database, or its primary, cannot be reached: try again later"},
	{code(exitInternal), "any other failure, such as a missing schema"},
	{code(exitBusy), "busy, try again later: somebody else holds the lock (-E of run and acquire sets another code), or uses what migrate would change"},
	{code(exitDenied), "the server refuses the user, the password, the database or a right"},
	{code(exitLost), "the lock was lost, or could not be renewed in time"},
	{code(exitNotRunnable), "run, lead, once: the command cannot be executed"},
	{code(exitNotFound), "run, lead, once: the command does not exist"},
	{code(exitSignal) + "+n", "signal n ended pgxlock, or the command of run, lead or once"},
}

func code(n int) string { return strconv.Itoa(n) }

// usageError is a fault in the command line.
type usageError struct{ error }

// errNotCurrent makes migrate status exit with its code, and says nothing: the
// status was printed.
var errNotCurrent = errors.New("")

// errNone makes ls exit with its code, and says nothing: the empty list was
// printed.
var errNone = errors.New("")

// errUnsound makes doctor exit with its code, and says nothing: the findings were
// printed.
var errUnsound = errors.New("")

// outcome is how a command ended that was to be run: with a code that becomes ours.
type outcome struct {
	code int
	error
}

func (o outcome) Unwrap() error { return o.error }

// errSilent is the error of an outcome of which nothing needs to be said.
var errSilent = errors.New("")

// interrupted is why a context ended when a signal came.
type interrupted struct{ signal syscall.Signal }

func (i interrupted) Error() string { return "ended by signal: " + i.signal.String() }

// exitCode returns the code that stands for an error.
func exitCode(err error) int {
	if o, ok := errors.AsType[outcome](err); ok {
		return o.code
	}
	if i, ok := errors.AsType[interrupted](err); ok {
		return exitSignal + int(i.signal)
	}
	if _, ok := errors.AsType[usageError](err); ok {
		return exitUsage
	}
	switch {
	case errors.Is(err, errNotCurrent):
		return exitNotCurrent
	case errors.Is(err, errNone):
		return exitNone
	case errors.Is(err, errUnsound):
		return exitUnsound
	case errors.Is(err, errNotEvicted):
		return exitNotEvicted
	case errors.Is(err, errLost), errors.Is(err, pgxlock.ErrLost):
		return exitLost
	case lockerr.Denied(err):
		return exitDenied
	case badInput(err):
		return exitUsage
	case busy(err):
		return exitBusy
	case unavailable(err):
		return exitUnavailable
	}
	return exitInternal
}

// badInput reports whether the functions refused an argument, and not the server a setting of the connection.
func badInput(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	_, unconnected := errors.AsType[*pgconn.ConnectError](err)
	return ok && pgErr.Code == pgerrcode.InvalidParameterValue && !unconnected
}

// busy reports whether somebody is in the way who will be gone later.
func busy(err error) bool {
	if _, ok := errors.AsType[*busyError](err); ok || errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, monitor.ErrStillHeld) {
		return true
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && slices.Contains([]string{pgerrcode.LockNotAvailable, pgerrcode.ObjectInUse}, pgErr.Code)
}

// unavailable reports whether there was no database to talk to, or only a standby. The
// deadline of an attempt to connect is the connect_timeout: no caller sets another one here.
func unavailable(err error) bool {
	_, unconnected := errors.AsType[*pgconn.ConnectError](err)
	return errors.Is(err, pgxlock.ErrUnavailable) || lockerr.Unreachable(err) || errors.Is(err, pgxlock.ErrReadOnly) ||
		unconnected && errors.Is(err, context.DeadlineExceeded)
}

// describe makes one line of an error, with what to do about it on the command that has these
// flags, and which connection it is about.
func describe(flags *pflag.FlagSet, err error) string {
	text := explain(flags, err)
	failed, unconnected := errors.AsType[*pgconn.ConnectError](err)
	if url := flags.Lookup("database-url"); unconnected && url != nil {
		text += "; the connection is that of " + origin(url.Value.String(), os.Getenv)
		if password := failed.Config.Password; password != "" && wrongPassword(failed) {
			text += after(", the password that of ", originOfPassword(url.Value.String(), password, os.Getenv))
		}
	}
	return text
}

// call is how the package names the call that a command makes, which is no news to its user.
var call = regexp.MustCompile(`^(pgxlock: )?((new|snapshot|migrations: [a-z]+): )?`)

// explain is describe where it is known which connection it is.
func explain(flags *pflag.FlagSet, err error) string {
	text := err.Error()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && badInput(err) { // which the flags gave
		text = strings.ReplaceAll(text, pgErr.Error(), inFlags(flags, arguments, pgErr.Message))
	}
	text = oneline.Join(text)
	failed, unconnected := errors.AsType[*pgconn.ConnectError](err)
	if unconnected {
		text = shorten(text, failed)
	}
	text = inFlags(flags, advices, strings.ReplaceAll(call.ReplaceAllString(printable(text), ""), ": pgxlock: ", ": "))
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Hint != "" && !errors.Is(err, pgxlock.ErrSchema) { // which says what to run
		text += "; " + clause(inFlags(flags, advices, printable(oneline.Join(pgErr.Hint))))
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.DependentObjectsStillExist && pgErr.Detail != "" {
		text += "; " + printable(oneline.Join(pgErr.Detail)) // names what is in the way
	}
	if e, ok := errors.AsType[*remediedError](err); ok && has(flags, e.remedy) {
		text += "; " + e.remedy
	}
	remedy := lockerr.Remedy(err)
	if unconnected {
		remedy = reconnect(failed)
	}
	hinted := false // of the one right that is lacking
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		hinted = pgErr.Code == pgerrcode.InsufficientPrivilege && pgErr.Hint != ""
	}
	if remedy != "" && !hinted && !strings.Contains(text, remedy) {
		text += "; " + remedy // as the package says of its statements
	}
	return text
}

// clause makes a part of a sentence of a sentence, as a server's hint is one.
func clause(hint string) string {
	hint = strings.TrimSuffix(hint, ".")
	if len(hint) > 1 && 'a' <= hint[1] && hint[1] <= 'z' { // not SET, which is SQL
		hint = strings.ToLower(hint[:1]) + hint[1:]
	}
	return hint
}

// flagError says what a flag wants, in the words of the command line, or which one may have
// been meant.
func flagError(cmd *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		var flags cobra.Command // cobra suggests commands only
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			flags.AddCommand(&cobra.Command{Use: "--" + f.Name, Run: func(*cobra.Command, []string) {}})
		})
		return fmt.Errorf("%w%s", err, meant(&flags, "--"+unknown.GetSpecifiedName()))
	}
	if missing, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		kind, _ := pflag.UnquoteUsage(missing.GetFlag())
		return fmt.Errorf("--%s needs a value (%s)", missing.GetFlag().Name, kind)
	}
	invalid, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	wants := map[string]string{"bool": "use true or false"}[invalid.GetFlag().Value.Type()]
	switch number, isNumber := errors.AsType[*strconv.NumError](err); {
	case wants != "":
	case isNumber && errors.Is(number, strconv.ErrRange):
		wants = "it is out of range"
	case isNumber:
		wants = "use a whole number"
	default:
		wants = invalid.Unwrap().Error()
	}
	return fmt.Errorf("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(), wants)
}
