package formats

import (
	"strings"
	"testing"
	"text/template"
)

// What is a template to tern must come out as the text that went in.
func TestTernsTemplateGivesTheTextBack(t *testing.T) {
	t.Parallel()
	up, down := "SELECT '{{1,2},{3,4}}'::int[]; -- {{ .Value }}\n", "SELECT '{{}}';\n"
	file := layout[Tern](7, "name", []string{up}, []string{down})[0]
	parsed, err := template.New("").Parse(file.Text)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := parsed.Execute(&out, nil); err != nil {
		t.Fatal(err)
	}
	if file.Name != "007_name.sql" || !strings.HasPrefix(out.String(), up) || !strings.HasSuffix(out.String(), down) {
		t.Errorf("%s: %q", file.Name, out.String())
	}
}
