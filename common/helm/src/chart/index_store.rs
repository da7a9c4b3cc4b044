//! Cache of the last indexes, which avoids downloading an unchanged index again.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use flate2::read::MultiGzDecoder;
use krypton_runtime::off_thread;
use krypton_types::fingerprint::sha256_hex;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, ETAG, HeaderMap, HeaderValue, IF_NONE_MATCH,
};
use reqwest::{StatusCode, Url};

use super::download::{Ask, Way, below};
use super::{ChartError, index, write_file};

/// Maximum number of cached indexes. A fleet has one repository, and each index takes at most 50 MiB on disk.
const REMEMBERED: usize = 4;
/// Maximum length of an `ETag` to send back.
const TAG_MAX: usize = 1024;
const ATTEMPT: &str = "reading index.yaml";

#[derive(Debug)]
pub(super) struct IndexStore {
    dir: PathBuf,
    known: Mutex<Vec<Known>>,
}

#[derive(Clone, Debug)]
struct Known {
    url: Url,
    tag: HeaderValue,
    path: PathBuf,
    sha256: String,
}

impl IndexStore {
    pub(super) fn new(dir: &Path) -> Self {
        let dir = dir.to_owned();
        let known = Mutex::default();
        Self { dir, known }
    }

    /// Returns the current index of `repo`.
    pub(super) async fn read(&self, way: &Way<'_>, repo: &Url) -> Result<Vec<u8>, ChartError> {
        let url = below(repo, "index.yaml");
        let before = match self.known(&url) {
            Some(known) => load(known.clone()).await.map(|bytes| (known, bytes)),
            None => None,
        };
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        if let Some((known, _)) = &before {
            headers.insert(IF_NONE_MATCH, known.tag.clone());
        }
        let ask = Ask {
            attempt: ATTEMPT,
            url: url.clone(),
            headers,
            authorization: way.authorization(repo),
        };
        let (response, _) = way.send(&ask).await?;
        if let (StatusCode::NOT_MODIFIED, Some((_, bytes))) = (response.status(), before) {
            return Ok(bytes);
        }
        let tag = response.headers().get(ETAG).cloned();
        let encoding = response.headers().get(CONTENT_ENCODING);
        let packed = encoding.is_some_and(|it| it == "gzip" || it == "x-gzip");
        let bytes = way
            .body(response, ATTEMPT, "index.yaml", index::LIMIT)
            .await?;
        let bytes = if packed {
            unpack(way, bytes).await?
        } else {
            bytes
        };
        match tag.filter(|tag| tag.len() <= TAG_MAX) {
            Some(tag) => self.keep(url, tag, bytes).await,
            None => Ok(bytes),
        }
    }

    fn known(&self, url: &Url) -> Option<Known> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().find(|known| known.url == *url).cloned()
    }

    /// Stores an index. An error only causes another download.
    async fn keep(
        &self,
        url: Url,
        tag: HeaderValue,
        bytes: Vec<u8>,
    ) -> Result<Vec<u8>, ChartError> {
        let dir = self.dir.clone();
        let name = format!("index-{}.yaml", sha256_hex(url.as_str().as_bytes()));
        let path = dir.join(name);
        let (written, bytes) = {
            let path = path.clone();
            off_thread::run(move || {
                let written = write_file(&dir, &path, &bytes);
                let written = written.map(|()| sha256_hex(&bytes));
                (written, bytes)
            })
            .await
        };
        let gone = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|known| known.url != url);
            let oldest = (known.len() >= REMEMBERED).then(|| known.remove(0));
            match written {
                Ok(sha256) => known.push(Known {
                    url,
                    tag,
                    path,
                    sha256,
                }),
                Err(error) => tracing::debug!(%error, "an index was not kept"),
            }
            oldest
        };
        if let Some(gone) = gone
            && let Err(error) = off_thread::run(move || std::fs::remove_file(gone.path)).await
        {
            tracing::debug!(%error, "failed to remove an old index");
        }
        Ok(bytes)
    }
}

/// Returns the stored index if its file is unchanged.
async fn load(known: Known) -> Option<Vec<u8>> {
    off_thread::run(move || {
        let bytes = std::fs::read(&known.path).ok()?;
        (sha256_hex(&bytes) == known.sha256).then_some(bytes)
    })
    .await
}

async fn unpack(way: &Way<'_>, packed: Vec<u8>) -> Result<Vec<u8>, ChartError> {
    let unpacked = off_thread::run(move || {
        let mut bytes = Vec::new();
        let most = MultiGzDecoder::new(packed.as_slice()).take(index::LIMIT + 1);
        io::copy(&mut io::BufReader::new(most), &mut bytes).map(|_| bytes)
    })
    .await
    .map_err(|source| ChartError::Unpacking {
        chart: Arc::clone(way.chart),
        source,
    })?;
    if unpacked.len() as u64 > index::LIMIT {
        return Err(ChartError::TooLarge {
            chart: Arc::clone(way.chart),
            what: "index.yaml",
            limit: index::LIMIT,
        });
    }
    Ok(unpacked)
}
