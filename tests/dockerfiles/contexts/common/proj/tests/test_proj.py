import unittest

import proj


class TestDouble(unittest.TestCase):
    def test_double(self) -> None:
        self.assertEqual(proj.double(2), 4)
