//! The style sheet, the scripts and the icon: compiled in, so that the dashboard works offline.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use data_encoding::HEXLOWER;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use sha2::{Digest, Sha256};

use crate::routes::{Access, Route};

struct Asset {
    path: &'static str,
    content_type: &'static str,
    content: &'static str,
}

macro_rules! assets {
    ($($path:literal, $kind:literal, $file:literal;)*) => {
        const ASSETS: &[Asset] = &[$(Asset {
            path: $path,
            content_type: $kind,
            content: include_str!(concat!("../../assets/", $file)),
        },)*];
    };
}

assets! {
    "/assets/everbus.css", "text/css; charset=utf-8", "everbus.css";
    "/assets/app.js", "text/javascript; charset=utf-8", "app.js";
    "/assets/api.js", "text/javascript; charset=utf-8", "api.js";
    "/assets/live.js", "text/javascript; charset=utf-8", "live.js";
    "/assets/charts.js", "text/javascript; charset=utf-8", "charts.js";
    "/assets/overview.js", "text/javascript; charset=utf-8", "overview.js";
    "/assets/events.js", "text/javascript; charset=utf-8", "events.js";
    "/assets/letters.js", "text/javascript; charset=utf-8", "letters.js";
    "/assets/groups.js", "text/javascript; charset=utf-8", "groups.js";
    "/assets/jobs.js", "text/javascript; charset=utf-8", "jobs.js";
    "/assets/theme.js", "text/javascript; charset=utf-8", "theme.js";
    "/assets/login.js", "text/javascript; charset=utf-8", "login.js";
    "/assets/icon.svg", "image/svg+xml", "icon.svg";
}

/// One ETag for all assets: they change only with the program.
static TAG: LazyLock<String> = LazyLock::new(|| {
    let mut hash = Sha256::new();
    for asset in ASSETS {
        hash.update(asset.content.as_bytes());
    }
    format!("\"{}\"", &HEXLOWER.encode(&hash.finalize())[..16])
});

pub(super) fn routes() -> Vec<Route> {
    let routes = ASSETS.iter().map(|asset| {
        let serve = move |headers: HeaderMap| async move { serve(asset, &headers) };
        Route::get(asset.path, Access::Public, serve)
    });
    routes.collect()
}

fn serve(asset: &'static Asset, headers: &HeaderMap) -> Response {
    let known = headers
        .get(header::IF_NONE_MATCH)
        .is_some_and(|tag| tag == TAG.as_str());
    let status = if known {
        StatusCode::NOT_MODIFIED
    } else {
        StatusCode::OK
    };
    let body = if known { "" } else { asset.content };
    let mut response = (status, body).into_response();
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static(asset.content_type);
    headers.insert(header::CONTENT_TYPE, kind);
    // The browser asks each time, and usually gets 304 Not Modified.
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    if let Ok(tag) = HeaderValue::from_str(&TAG) {
        headers.insert(header::ETAG, tag);
    }
    response
}
