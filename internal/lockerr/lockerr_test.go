package lockerr_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// pqError is an error of a driver whose types are not known here.
type pqError string

func (e pqError) Error() string    { return "pq: " + string(e) }
func (e pqError) SQLState() string { return string(e) }

func state(code string) error {
	return &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: code}
}

// connecting makes the error of an attempt to connect to hosts that fail so.
func connecting(t *testing.T, hosts ...error) error {
	t.Helper()
	config, err := pgconn.ParseConfig("host=127.0.0.1 port=1 user=u sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	config.DialFunc = func(context.Context, string, string) (net.Conn, error) { return nil, errors.Join(hosts...) }
	_, err = pgconn.ConnectConfig(t.Context(), config)
	if _, ok := errors.AsType[*pgconn.ConnectError](err); !ok {
		t.Fatal(err)
	}
	return err
}

func TestErrorIsEitherUnreachableOrDenied(t *testing.T) {
	t.Parallel()
	refused := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	for what, test := range map[string]struct {
		err                            error
		unreachable, denied, transient bool
	}{
		"nothing listens":                   {connecting(t, refused), true, false, true},
		"a network error":                   {fmt.Errorf("read: %w", refused), true, false, true},
		"the connection broke":              {io.ErrUnexpectedEOF, true, false, true},
		"it was closed before":              {pgconn.ErrConnClosed, true, false, true},
		"database/sql's word for it":        {driver.ErrBadConn, true, false, true},
		"the server starts":                 {connecting(t, state("57P03")), true, false, true},
		"the server is full":                {connecting(t, state("53300")), true, false, true},
		"login took too long":               {connecting(t, state("57014")), true, false, true},
		"something else while connecting":   {connecting(t, state("XX000")), true, false, true},
		"no check of the host's":            {connecting(t, errors.New("read only connection")), true, false, true},
		"a caller's deadline":               {connecting(t, context.DeadlineExceeded), false, false, true},
		"terminated":                        {state("57P01"), true, false, true},
		"crashed":                           {state("57P02"), true, false, true},
		"the database was dropped":          {state("57P04"), true, false, true},
		"idle for too long":                 {state("57P05"), true, false, true},
		"idle in a transaction for long":    {state("25P03"), true, false, true},
		"in a transaction for long":         {state("25P04"), true, false, true},
		"of lib/pq":                         {fmt.Errorf("x: %w", pqError("57P05")), true, false, true},
		"a pooler lost its server":          {state("08006"), true, false, true},
		"a pooler is full or has no server": {connecting(t, state("08P01")), true, false, true},
		"and says so after the login":       {state("08P01"), true, false, true},
		"a statement cancelled":             {state("57014"), false, false, true},
		"the disk is full":                  {state("53100"), false, false, true},
		"a lock_timeout":                    {state("55P03"), false, false, true},
		"a serialization failure":           {state("40001"), false, false, false},
		"bad input":                         {state("22023"), false, false, false},
		"a missing function":                {state("42883"), false, false, false},
		"a wrong password":                  {connecting(t, state("28P01")), false, true, false},
		"not in pg_hba.conf":                {connecting(t, state("28000")), false, true, false},
		"no such database":                  {connecting(t, state("3D000")), false, true, false},
		"no CONNECT":                        {connecting(t, state("42501")), false, true, false},
		"an unknown setting":                {connecting(t, state("42704")), false, true, false},
		"a setting only the server may set": {connecting(t, state("55P02")), false, true, false},
		"a setting out of range":            {connecting(t, state("22023")), false, true, false},
		"no right for a function":           {state("42501"), false, true, false},
		"one address refused, one password": {connecting(t, refused, state("28P01")), false, true, false},
		"one starts, one database":          {connecting(t, state("57P03"), state("3D000")), false, true, false},
		"one silent, one password":          {connecting(t, context.DeadlineExceeded, state("28P01")), false, true, false},
		"no error of a server":              {errors.New("x"), false, false, true},
	} {
		if got := lockerr.Unreachable(test.err); got != test.unreachable {
			t.Errorf("%s: Unreachable is %t: %v", what, got, test.err)
		}
		if got := lockerr.Denied(test.err); got != test.denied {
			t.Errorf("%s: Denied is %t: %v", what, got, test.err)
		}
		if got := lockerr.Transient(test.err); got != test.transient {
			t.Errorf("%s: Transient is %t: %v", what, got, test.err)
		}
		if test.unreachable && (test.denied || !test.transient) || test.denied && test.transient {
			t.Errorf("%s: the table contradicts itself", what)
		}
	}
}

func TestPartsWithoutADeadlineKeepWhatOtherHostsSaid(t *testing.T) {
	t.Parallel()
	standby := errors.New("a standby")
	err := connecting(t, fmt.Errorf("host a: %w", context.DeadlineExceeded), fmt.Errorf("host b: %w", standby), state("28P01"))
	rest := errors.Join(lockerr.Without(err, context.DeadlineExceeded)...)
	if errors.Is(rest, context.DeadlineExceeded) || !errors.Is(rest, standby) || !slices.Equal(slices.Collect(lockerr.States(rest)), []string{"28P01"}) {
		t.Errorf("%v is left of %v", rest, err)
	}
	if whole := lockerr.Without(err, io.EOF); len(whole) != 1 || whole[0] != err { //nolint:errorlint // the same one
		t.Errorf("%v, though there was no such part", whole)
	}
	if rest := lockerr.Without(fmt.Errorf("x: %w", io.EOF), io.EOF); rest != nil {
		t.Errorf("%v is left", rest)
	}
}
