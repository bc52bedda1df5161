package containers

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }
