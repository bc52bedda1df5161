// Package connstring reads connection strings for the command, which must understand
// the one that a program already has: in both forms, with the words of pgx's pool, and
// with those that only lib/pq knows. Its errors hold no password.
package connstring

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
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
	withoutEquivalent = []struct{ word, remedy string }{
		{"hostaddr", "give the address as host"},
		{"sslinline", "give the certificate and the key as files"},
		{"ssl_min_protocol_version", "set it on the server, and leave it out"},
		{"ssl_max_protocol_version", "set it on the server, and leave it out"},
	}

	// what the server calls them
	otherNames = map[string]string{"fallback_application_name": "application_name", "tz": "timezone"}
)

// foreign is how URLs begin, those of JDBC and SQLAlchemy too.
var foreign = regexp.MustCompile(`^(?i:jdbc:(?:[a-z]+:)?(?://)?|[a-z][a-z0-9+.-]*://)`)

// Parse reads a connection string; what it leaves open is in the PG* variables.
// An error is a predicate, to be put behind what the string is called, and wraps
// nothing that holds the string.
func Parse(connString string) (*pgxpool.Config, error) {
	switch begin := foreign.FindString(connString); {
	case begin == "" && neither(connString):
		return nil, errors.New("is not a PostgreSQL connection string (it neither begins with postgres:// nor is a list such as host=localhost dbname=app)")
	case begin == "" || begin == "postgres://" || begin == "postgresql://":
	case !strings.Contains(strings.ToLower(begin), "postgres"):
		return nil, fmt.Errorf("is not a PostgreSQL connection string (it begins with %s: pgxlock needs PostgreSQL)", begin)
	default:
		return nil, fmt.Errorf("is not a PostgreSQL connection string (it begins with %s: begin it with postgres://, and leave out what only another driver knows)", begin)
	}
	config, err := pgxpool.ParseConfig(connString)
	if err != nil {
		return nil, fmt.Errorf("is not a PostgreSQL connection string (%s)", reason(connString, err))
	}
	params := config.ConnConfig.RuntimeParams
	for _, word := range withoutMeaning {
		delete(params, word)
	}
	for _, without := range withoutEquivalent {
		if params[without.word] != "" {
			return nil, fmt.Errorf("has %s, which pgxlock does not support: %s", without.word, without.remedy)
		}
		delete(params, without.word)
	}
	for word, name := range otherNames {
		if value, given := params[word]; given && params[name] == "" {
			params[name] = value
		}
		delete(params, word)
	}
	return config, nil
}

// cut reports whether a special character in a password may have ended the part of a URL that names user and host.
func cut(connString string) bool {
	_, rest, _ := strings.Cut(connString, "://")
	end := strings.IndexAny(rest, "/?#")
	return end >= 0 && !strings.Contains(rest[:end], "@") && strings.Contains(rest[end:], "@")
}

// neither reports whether a text that is no URL is no list of keywords either: without this check pgx would take
// user@host/db?sslmode=disable for one setting, and connect to the default server.
func neither(connString string) bool {
	keyword, _, pair := strings.Cut(connString, "=")
	return strings.TrimSpace(connString) != "" && (!pair || strings.ContainsAny(keyword, ":/@"))
}

// reason says why a connection string cannot be read. pgx quotes the string, and
// its causes the part that they stumbled over: in a string that cannot be taken
// apart, either may hold the password, and a file's name may be a key in PEM.
func reason(connString string, err error) string {
	if strings.Contains(connString, "://") {
		if _, bad := url.Parse(connString); bad != nil {
			if strings.Contains(bad.Error(), "invalid port") && !cut(connString) {
				return "invalid port"
			}
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
