"""What a cluster costs: from AWS's price list when it may be asked, else from the dated table in prices.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from provisioning.aws import Aws, error_code

TABLE = Path(__file__).with_name("prices.json")


@dataclass(frozen=True)
class Prices:
    """US dollars; None where unknown."""

    per_hour: float | None
    """One instance for an hour."""
    per_gb_month: float | None
    """A GB of gp3 disk for a month."""
    snapshot_gb_month: float | None
    """A GB of an image's snapshot for a month, by the table: the price list has no attribute to find it by."""
    per_address: float
    """A public IPv4 address for an hour; the same in all regions, so always from the table."""
    source: str
    """Where the figures come from, with their date."""


def look_up(aws: Aws, instance_type: str, spot: bool) -> Prices:
    """Prices in the region of `aws`. Never fails: what cannot be asked comes from the table or is unknown."""
    from botocore.exceptions import BotoCoreError, ClientError

    table = json.loads(TABLE.read_text())
    try:
        machine = _listed(
            aws,
            instanceType=instance_type,
            operatingSystem="Linux",
            tenancy="Shared",
            preInstalledSw="NA",
            capacitystatus="Used",
            marketoption="OnDemand",
        )
        disk = _listed(aws, productFamily="Storage", volumeApiName="gp3")
        source = f"AWS price list, {aws.region}"
    except (BotoCoreError, ClientError, KeyError, ValueError) as error:
        machine = table["usd_per_hour"].get(instance_type)
        disk = table["usd_per_gb_month_gp3"]
        source = f"table of {table['as_of']}, {table['region']}; the price list was not available ({_short(error)})"
    if spot:
        try:
            machine = _spot_price(aws, instance_type)
            source += "; spot: the dearest zone now"
        except (BotoCoreError, ClientError):
            source += "; the spot price is not known, so on demand"
    return Prices(machine, disk, table["usd_per_gb_month_snapshot"], table["usd_per_hour_public_ipv4"], source)


def _listed(aws: Aws, **attributes: str) -> float | None:
    """The one on-demand price of the product with these attributes; None where there is none."""
    wanted = {"regionCode": aws.region, **attributes}
    matches = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()]
    products = aws.pricing.get_products(ServiceCode="AmazonEC2", Filters=matches)["PriceList"]
    for product in map(json.loads, products):
        for term in product["terms"]["OnDemand"].values():
            for dimension in term["priceDimensions"].values():
                return float(dimension["pricePerUnit"]["USD"])
    return None


def _spot_price(aws: Aws, instance_type: str) -> float | None:
    from datetime import datetime, timezone

    history = aws.ec2.describe_spot_price_history(
        InstanceTypes=[instance_type], ProductDescriptions=["Linux/UNIX"], StartTime=datetime.now(timezone.utc)
    )["SpotPriceHistory"]
    return max((float(entry["SpotPrice"]) for entry in history), default=None)


def _short(error: Exception) -> str:
    return error_code(error) or type(error).__name__
