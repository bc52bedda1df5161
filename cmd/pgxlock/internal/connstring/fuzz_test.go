package connstring_test

import (
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/connstring"
)

// FuzzConnectionStrings looks for a string whose password an error repeats: in each form, with text
// around the password as people forget to quote it, and with other settings.
func FuzzConnectionStrings(f *testing.F) {
	const secret = "gEhEiM"
	forms := []string{
		"postgres://me:PASSWORD@h:5432/db?REST", "postgres://me:PASSWORD@[::1]:1,h2/db?target_session_attrs=any&REST", "postgres:///db?host=/tmp&password=PASSWORD&REST",
		"host=h user=me password=PASSWORD REST", "host=h password='PASSWORD' REST", "REST sslmode=require sslkey=/no sslcert=/no sslpassword=PASSWORD",
	}
	for form := range forms {
		for _, around := range [][2]string{{"", ""}, {"my ", ""}, {"'", ""}, {"%zz", ""}, {"", "@"}, {"a/", ":b"}, {"`: ", "\n"}, {"", `\`}, {"x=y ", ""}, {"#", "?"}} {
			for _, rest := range []string{"", "sslmode=perhaps", "port=much", "pool_max_conns=-1", "connect_timeout=x", "sslrootcert=/no", "hostaddr=1", "default_query_exec_mode=none", "service=none"} {
				f.Add(uint8(form), around[0], around[1], rest)
			}
		}
	}
	f.Fuzz(func(t *testing.T, form uint8, before, behind, rest string) {
		connString := strings.NewReplacer("PASSWORD", before+secret+behind, "REST", rest).Replace(forms[int(form)%len(forms)])
		config, err := connstring.Parse(connString)
		if (config == nil) == (err == nil) {
			t.Errorf("%q: %v, %v", connString, config, err)
		}
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("%q: %v", connString, err)
		}
	})
}
