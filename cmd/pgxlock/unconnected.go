package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"
	"syscall"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// shorten replaces what pgx says of a failed connection in text, which is one line: pgx lists
// each attempt, with TLS and without, at each address.
func shorten(text string, failed *pgconn.ConnectError) string {
	lines := strings.Split(failed.Error(), "\n")
	begin := strings.Index(text, oneline.Join(lines[0]))
	if begin < 0 {
		return text
	}
	end := begin
	for _, line := range lines { // a repeated one may have been left out
		if line = oneline.Join(line); strings.Contains(text[begin:], line) {
			end = max(end, strings.LastIndex(text, line)+len(line))
		}
	}
	before, _, _ := strings.Cut(text[:begin], strings.TrimPrefix(pgxlock.ErrUnavailable.Error(), "pgxlock: ")) // which is said better now
	return before + unconnected(failed) + text[end:]
}

// unconnected says who could not connect where, and why.
func unconnected(failed *pgconn.ConnectError) string {
	var hosts []string
	causes := map[string]cause{}
	for _, err := range attempts(failed) {
		host, why := attempted(err)
		known, again := causes[host]
		if !again {
			hosts = append(hosts, host)
		}
		if !again || why.weight > known.weight {
			causes[host] = why
		}
	}
	for i, host := range hosts {
		hosts[i] = "at " + host + ": " + causes[host].text
	}
	return fmt.Sprintf("cannot connect as user %q to database %q %s", failed.Config.User, cmp.Or(failed.Config.Database, failed.Config.User), strings.Join(hosts, ", "))
}

// attempts returns the error of each attempt to connect.
func attempts(err error) []error {
	for inner := err; inner != nil; inner = errors.Unwrap(inner) {
		if several, ok := inner.(interface{ Unwrap() []error }); ok {
			return several.Unwrap()
		}
	}
	return []error{errors.Unwrap(err)}
}

// cause is why an attempt failed. Of those at one host the weightiest counts.
type cause struct {
	text   string
	weight int
}

// attempted returns the host of an attempt, and why it failed. pgx puts the address and the
// name of the host before each error but those of the name itself.
func attempted(err error) (host string, why cause) {
	if unknown, ok := errors.AsType[*net.DNSError](err); ok {
		return unknown.Name[strings.LastIndex(unknown.Name, "@")+1:], cause{unknown.Err, 1} // before an @ is the rest of a password
	}
	address, rest, _ := strings.Cut(err.Error(), " (")
	name, rest, _ := strings.Cut(rest, "): ")
	host = address
	if _, port, err := net.SplitHostPort(address); err == nil {
		host = net.JoinHostPort(name, port)
	}
	var pgErr *pgconn.PgError
	var errno syscall.Errno
	switch {
	case errors.As(err, &pgErr):
		return host, cause{pgErr.Message + " (SQLSTATE " + pgErr.Code + ")", 2}
	case errors.Is(err, pgconn.ErrReadOnlyConnection):
		return host, cause{"its transactions are read-only, which target_session_attrs=read-write refuses", 2}
	case errors.Is(err, lockerr.ErrWorker):
		return host, cause{"it is a worker of Citus", 2}
	case standby(err):
		return host, cause{"it is a standby", 2}
	case errors.Is(err, context.DeadlineExceeded):
		return host, cause{"no answer in time", 1}
	case errors.As(err, &errno):
		return host, cause{errno.Error(), 1}
	case strings.Contains(rest, refusedTLS):
		return host, cause{"it has no TLS", 0}
	}
	return host, cause{rest, 1}
}

// refusedTLS is what pgx, which has no name for it, says of a server without TLS.
const refusedTLS = "server refused TLS connection"

// standby reports whether a server was refused for being a standby, by us or by target_session_attrs=primary.
func standby(err error) bool {
	return errors.Is(err, pgxlock.ErrReadOnly) || errors.Is(err, pgconn.ErrStandbyConnection)
}

// wrongPassword reports whether a server refused the password.
func wrongPassword(err error) bool {
	return slices.Contains(slices.Collect(lockerr.States(err)), pgerrcode.InvalidPassword)
}

// reconnect says what to do about a connection that failed.
func reconnect(err error) string {
	unknown, _ := errors.AsType[*net.DNSError](err)
	states := slices.Collect(lockerr.States(err))
	failed, _ := errors.AsType[*pgconn.ConnectError](err)
	switch {
	case failed != nil && failed.Config.Password == "" && wrongPassword(err):
		return "no password was given: put it into PGPASSWORD, ~/.pgpass, a service file or the connection string"
	case lockerr.Denied(err):
		return lockerr.Remedy(err)
	case slices.Contains(states, pgerrcode.TooManyConnections):
		return "close idle connections, or raise max_connections, or the CONNECTION LIMIT of the role or the database"
	case slices.Contains(states, pgerrcode.CannotConnectNow):
		return "try again when the server has started"
	case lockerr.Untrusted(err):
		return "its certificate is not trusted: see sslrootcert and sslmode"
	case errors.Is(err, lockerr.ErrWorker):
		return "connect to the coordinator"
	case standby(err):
		return "connect to the primary, or name all hosts: postgres://user@host1,host2/database"
	case errors.Is(err, pgconn.ErrReadOnlyConnection):
		return "target_session_attrs=primary accepts the primary whatever default_transaction_read_only is"
	case unknown != nil && strings.Contains(unknown.Name, "@"):
		return "special characters in a password must be percent-encoded"
	case unknown != nil:
		return "correct the name of the host"
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return "start the server, or correct the host and the port"
	case errors.Is(err, context.DeadlineExceeded):
		return "check the host, the port, and firewalls in between"
	}
	if strings.Contains(err.Error(), refusedTLS) {
		return "enable TLS on the server, or use sslmode=disable"
	}
	return "check the server and the connection string"
}
