package lockkey

import "hash/crc32"

// OfMigrators returns the number that golang-migrate's drivers for PostgreSQL lock while they
// migrate, as GenerateAdvisoryLockId in its package database makes it. Its library calls the
// database by its name, and its command by its name after a slash.
func OfMigrators(database, schema, table string) int64 {
	const salt = 1486364155
	return int64(crc32.ChecksumIEEE([]byte(schema+"\x00"+table+"\x00"+database)) * salt)
}
