// Package connstring reads connection strings, of which a program shall need one
// only: in both forms, with the words of pgx's pool, and with those that only
// lib/pq knows. What it says of a string that it cannot read holds no password.
package connstring

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Words of lib/pq that pgx takes for settings of the server, which refuses them.
// See https://pkg.go.dev/github.com/lib/pq#Config.
var (
	// how that driver talks, and to which of several servers first
	withoutMeaning = []string{"binary_parameters", "disable_prepared_binary_result", "load_balance_hosts"}

	// where to, and how safely: to pass over these would not be what was asked for
	withoutEquivalent = []string{"hostaddr", "sslinline", "ssl_min_protocol_version", "ssl_max_protocol_version"}

	// what the server calls them
	otherNames = map[string]string{"fallback_application_name": "application_name", "tz": "timezone"}
)

// Parse reads a connection string; what it leaves open is in the PG* variables.
// An error is a predicate, to be put behind what the string is called, and wraps
// nothing that holds the string.
func Parse(connString string) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(connString)
	if err != nil {
		return nil, fmt.Errorf("is not a PostgreSQL connection string (%s)", reason(connString, err))
	}
	params := config.ConnConfig.RuntimeParams
	for _, word := range withoutMeaning {
		delete(params, word)
	}
	for _, word := range withoutEquivalent {
		if value, given := params[word]; given && value != "" {
			return nil, fmt.Errorf("has %s, which pgx does not know; make a pgxpool.Config that does the same: %w", word, errors.ErrUnsupported)
		}
		delete(params, word)
	}
	for word, name := range otherNames {
		if value, given := params[word]; given && params[name] == "" {
			params[name] = value
		}
		delete(params, word)
	}
	return config, nil
}

// reason says why a connection string cannot be read. pgx quotes the string, and
// its causes the part that they stumbled over: in a string that cannot be taken
// apart, either may hold the password, and a file's name may be a key in PEM.
func reason(connString string, err error) string {
	if strings.Contains(connString, "://") {
		if _, bad := url.Parse(connString); bad != nil {
			return "not a URL: special characters in a password must be percent-encoded"
		}
	}
	parse, ok := errors.AsType[*pgconn.ParseConfigError](err)
	if !ok {
		return "pgx cannot read it"
	}
	text, cause := parse.Error(), ""
	if inner := parse.Unwrap(); inner != nil {
		cause = " (" + inner.Error() + ")"
		text = strings.TrimSuffix(text, cause)
	}
	const behindTheString = "`: "
	what := strings.LastIndex(text, behindTheString)
	if what < 0 {
		return "pgx cannot read it"
	}
	text = text[what+len(behindTheString):]
	quotes := strings.Contains(cause, `"`) && text != "failed to configure TLS" || strings.Contains(connString, "-----BEGIN")
	if quotes {
		return text
	}
	return text + cause
}
