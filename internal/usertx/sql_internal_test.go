package usertx

import (
	"database/sql"
	"encoding/hex"
	"math"
	"regexp"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/sql"
)

// hostile are texts that would end, change or lose a literal that was merely put in quotes.
var hostile = []string{
	"", "order:42", "o'key", `back\slash\`, `\'; DROP TABLE bookings; --`, "a?b", "a?tenant", `a\?b`, "$1", "$2 and $1", "$$", "$tag$",
	"E'x'", "--", "/*", "*/", "a\nb; SELECT 1", "a\r\n'", "%s %d %%", ":name", "@name", "a\x00b", "\xff", "a\x80'", "\xbf'", "\xbf\\", "\x95\\'",
	"é", "世界", "🔒", "表'", "\u2028", "' OR ''='", "{1,2}", "pg_catalog.convert_from('", "NULL",
}

// A literal is one of these, whatever the text is. So it is one literal to every server, and there is
// nothing in it for a library to rewrite.
var (
	quoted = regexp.MustCompile(`^'([0-9A-Za-z _.,:/+{}-]*)'$`)
	coded  = regexp.MustCompile(`^pg_catalog\.convert_from\(pg_catalog\.decode\('((?:[0-9a-f]{2})+)', 'hex'\), 'UTF8'\)$`)
)

// FuzzWritten checks that each text is written so, and read as what it is.
func FuzzWritten(f *testing.F) {
	for _, text := range hostile {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		literal := Written("$1", text)
		if plain := quoted.FindStringSubmatch(literal); plain != nil {
			if plain[1] != text {
				t.Errorf("%q is written as %s", text, literal)
			}
		} else if digits := coded.FindStringSubmatch(literal); digits == nil {
			t.Errorf("%q is written as %s", text, literal)
		} else if decoded, err := hex.DecodeString(digits[1]); err != nil || string(decoded) != text {
			t.Errorf("%q is written as %s, which is %q: %v", text, literal, decoded, err)
		}
		// In one pass, and no comment ends with what is in it.
		another := Written("$1", text+"$1")
		if got, want := Written("-- $1\nSELECT $2, $1", text, text+"$1"), "-- "+literal+"\nSELECT "+another+", "+literal; got != want {
			t.Errorf("%q: %s\nwant %s", text, got, want)
		}
	})
}

func TestWrittenNumbersAndBytesAreLiterals(t *testing.T) {
	t.Parallel()
	half, none := 0.5, (*float64)(nil)
	for want, arg := range map[string]any{
		"'-9223372036854775808'":    int64(math.MinInt64),
		"'10000'":                   10_000,
		"'{-1,2}'":                  []int64{-1, 2},
		"'{}'":                      []int64(nil),
		"'0.5'":                     &half,
		"'2.592e+06'":               2592000.0,
		"'1.7976931348623157e+308'": math.MaxFloat64,
		"NULL":                      none,

		"pg_catalog.decode('', 'hex')":         []byte(nil),
		"pg_catalog.decode('006fff27', 'hex')": []byte("\x00o\xff'"),
	} {
		if got := Written("$1", arg); got != want {
			t.Errorf("%v is written as %s, want %s", arg, got, want)
		}
	}
	if got := Written("$10 $1", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10); got != "'10' '1'" {
		t.Error(got)
	}
}

// A library that rewrites what it sends finds nothing to rewrite in our statements either.
func TestStatementsInTransactionsHaveNothingToRewrite(t *testing.T) {
	t.Parallel()
	for _, name := range []statements.Name{
		statements.TxAnswer, statements.TxAnswerRequest, statements.TxAsk, statements.TxClaim, statements.TxClaimRequest,
		statements.TxInTransaction, statements.TxKept, statements.TxLock, statements.TxLockAll, statements.TxLockWithin,
		statements.TxPurgeClaims, statements.TxReadAnswer, statements.TxShared, statements.TxTryLock,
		statements.TxVersion, statements.TxVouch, statements.ConnWorker, statements.AdvisoryFence, statements.LeaseFence, statements.LeaseFenceShared,
	} {
		text := name.Text()
		if i := strings.IndexFunc(text, func(r rune) bool { return strings.ContainsRune(`?\%@`, r) || r > '~' }); i >= 0 {
			t.Errorf("%s: %q", name, text[i:])
		}
	}
}

// The transactions of libraries, by their shape: of sqlx and bun, of GORM with PrepareStmt, of ent.
type (
	embeds   struct{ *sql.Tx }
	prepares struct {
		embeds
		Tx sqlRunner
	}
	hides  struct{ sqlRunner }
	around struct {
		sqlRunner
		Tx any
	}
)

func TestTransactionBeneathIsFound(t *testing.T) {
	t.Parallel()
	tx := new(sql.Tx)
	circle := &around{}
	circle.Tx = circle
	for name, test := range map[string]struct {
		of    sqlRunner
		known bool
	}{
		"database/sql":         {tx, true},
		"sqlx":                 {&embeds{tx}, true},
		"bun":                  {embeds{tx}, true},
		"GORM that prepares":   {&prepares{Tx: tx}, true},
		"one in another":       {&prepares{Tx: embeds{tx}}, true},
		"ent":                  {&hides{tx}, false},
		"a circle":             {circle, false},
		"another thing of Tx":  {&around{Tx: 42}, false},
		"nothing of that name": {&around{}, false},
	} {
		got := SQL(test.of)
		if got == nil {
			t.Errorf("%s: nil", name)
			continue
		}
		if known := got.Shares().owner != nil && got.Shares().owner == SQL(tx).Shares().owner; known != test.known {
			t.Errorf("%s: known %t, want %t", name, known, test.known)
		}
	}
	for i, none := range []sqlRunner{nil, (*sql.Tx)(nil), (*embeds)(nil), embeds{}, &embeds{}, &prepares{Tx: (*sql.Tx)(nil)}} {
		if SQL(none) != nil {
			t.Errorf("%d: not nil", i)
		}
	}
}
