-- The role whose rights count.
SELECT current_user::text
